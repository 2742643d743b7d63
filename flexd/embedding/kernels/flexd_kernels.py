"""The kernels of a home that answers by sums: gather of distinct rows, sums of bags, gradients of rows, update.

They are those of ``BagExchange`` and ``RowWiseAdagrad`` on one rank; tables of one dim share each kernel, as those of
a dim-group do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional

from flexd.core.errors import TopologyError
from flexd.embedding import devices
from flexd.embedding.row_optimizers import GroupUpdate, RowWiseAdagrad
from flexd.topology.kernel_design import Int64Array
from flexd.topology.kernel_file import TableSet

_ALIGNED_BYTES = 64
_ALIGNMENTS = 64
"""Tensors that may begin at an aligned place beyond the bytes that were requested."""


class RowMemory:
    """Memory that all measured tables share, so that none is allocated anew: zeros, which an update with gradients of
    zero leaves as they are."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # Written once: pages that were never written would all be the same one, which a cache holds.
        self.bytes = torch.empty(nbytes + _ALIGNMENTS * _ALIGNED_BYTES, dtype=torch.uint8, device=device).fill_(0)

    def tensors(self, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return disjoint tensors of zeros of these shapes, from the memory's start on.

        Raises:
            TopologyError: they are larger than the memory.
        """
        found, at = [], 0
        for rows, width in shapes:
            size = rows * width * dtype.itemsize
            if at + size > len(self.bytes):
                raise TopologyError(
                    f"tables of {at + size:,} bytes and more, memory for kernels is {len(self.bytes):,}",
                    remedy="measure smaller sets",
                )
            found.append(self.bytes[at : at + size].view(dtype).view(rows, width))
            at += -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return found


@dataclass
class _DimGroup:
    """One dim-group of a set: what a step reads and writes."""

    rows: torch.Tensor
    state: torch.Tensor
    grads: torch.Tensor
    slots: torch.Tensor
    expand: torch.Tensor
    offsets: torch.Tensor
    bag: torch.Tensor
    wide: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def look_up(self) -> None:
        self.wide = self.rows.index_select(0, self.slots).to(torch.float32)

    def pool(self) -> torch.Tensor:
        return functional.embedding_bag(self.expand, self.wide, self.offsets, mode="sum", include_last_offset=True)

    def update_of(self) -> GroupUpdate:
        """Add the bags' gradients up by row."""
        order = torch.sort(self.expand, stable=True).indices
        numbers = devices.sum_by_place(self.expand, None, len(self.slots))
        ends = functional.pad(numbers.cumsum(0), (1, 0))
        grads = functional.embedding_bag(
            self.bag.index_select(0, order), self.grads, ends, mode="sum", include_last_offset=True
        )
        return GroupUpdate(self.rows, self.state, [(self.slots, grads)])


class FlexdKernels:
    """``FusedKernels`` of ``flexd.EmbeddingBagCollection`` with row-wise Adagrad.

    Args:
        memory_bytes: of the largest set that is measured, rows and optimizer state.
    """

    name = "flexd"

    def __init__(self, memory_bytes: int, device: torch.device) -> None:
        self.device = device
        self._rows, self._state = RowMemory(memory_bytes, device), RowMemory(memory_bytes, device)
        self._optimizer = RowWiseAdagrad(lr=0.01, stochastic_rounding=False)

    def phases(self, tables: TableSet, ids: Sequence[Int64Array]) -> Sequence[Callable[[], object]]:
        """Return look-up, pooling and update; see ``FusedKernels``."""
        groups = self._groups(tables, ids)

        def look_up() -> None:
            for group in groups:
                group.look_up()

        def pool() -> None:
            for group in groups:
                group.pool()

        def update() -> None:
            self._optimizer.update_groups([group.update_of() for group in groups], 1)

        return look_up, pool, update

    def _groups(self, tables: TableSet, ids: Sequence[Int64Array]) -> list[_DimGroup]:
        dims = np.unique(tables.dim)
        of_dim = [np.flatnonzero(tables.dim == dim) for dim in dims]
        total = [int(tables.rows[chosen].sum()) for chosen in of_dim]
        rows = self._rows.tensors(
            [(n, int(dim)) for n, dim in zip(total, dims, strict=True)], getattr(torch, tables.dtype)
        )
        states = self._state.tensors([(n, 1) for n in total], torch.float32)
        made = []
        for chosen, of_rows, state in zip(of_dim, rows, states, strict=True):
            first = np.cumsum(tables.rows[chosen]) - tables.rows[chosen]
            keys = np.concatenate([ids[at] + int(start) for at, start in zip(chosen.tolist(), first, strict=True)])
            slots, expand = np.unique(keys, return_inverse=True)
            offsets = bag_offsets(tables, chosen)
            bag = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
            numbers = [torch.from_numpy(values).to(self.device) for values in (slots, expand, offsets, bag)]
            grads = torch.zeros(len(offsets) - 1, of_rows.shape[1], device=self.device)
            made.append(_DimGroup(of_rows, state, grads, numbers[0], numbers[1], numbers[2], numbers[3]))
        return made


def bag_offsets(tables: TableSet, chosen: Int64Array) -> Int64Array:
    """Return int64 [bags + 1] offsets of the bags of the chosen tables, one after the other; bags of a table differ by
    at most one id."""
    ends = [np.zeros(1, np.int64)]
    for at in chosen.tolist():
        ids, bags = int(tables.ids[at]), int(tables.bags[at])
        ends.append(ends[-1][-1] + (np.arange(1, bags + 1) * ids) // bags)
    return np.concatenate(ends)
