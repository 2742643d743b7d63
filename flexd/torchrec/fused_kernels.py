"""FBGEMM's table-batched embeddings, TorchRec's fused look-up, pooling and update, for ``flexd probe --kernels``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from flexd.core.errors import MissingExtraError, TopologyError
from flexd.topology.kernel_design import Int64Array
from flexd.topology.kernel_file import TableSet

try:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )
except ImportError as error:
    raise MissingExtraError(f"FBGEMM is not installed: {error}", remedy="pip install 'flexd[torchrec]'") from error

_DTYPES = {"float32": SparseType.FP32, "float16": SparseType.FP16}
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


class FbgemmKernels:
    """``FusedKernels`` of TorchRec's fused ``EmbeddingBagCollection`` with row-wise Adagrad. Its look-up includes
    pooling, and its backward pass the update.

    Args:
        memory_bytes: of the largest set that is measured, rows and optimizer state.
    """

    name = "fbgemm"

    def __init__(self, memory_bytes: int, device: torch.device) -> None:
        self.device = device
        self._rows = RowMemory(memory_bytes, device)
        self._state = RowMemory(memory_bytes, device)

    def phases(self, tables: TableSet, ids: Sequence[Int64Array]) -> Sequence[Callable[[], object]]:
        """Return look-up and update; see ``FusedKernels``."""
        module = self._module(tables)
        indices = torch.from_numpy(np.concatenate(list(ids))).to(self.device)
        offsets = torch.from_numpy(bag_offsets(tables, np.arange(len(tables.rows)))).to(self.device)
        made: dict[str, torch.Tensor] = {}

        def look_up() -> None:
            made["out"] = module(indices, offsets)
            made.setdefault("grads", torch.zeros_like(made["out"]))

        def update() -> None:
            made["out"].backward(made["grads"])  # type: ignore[no-untyped-call]

        return look_up, update

    def _module(self, tables: TableSet) -> Any:
        cuda = self.device.type == "cuda"
        place = EmbeddingLocation.DEVICE if cuda else EmbeddingLocation.HOST
        compute = ComputeDevice.CUDA if cuda else ComputeDevice.CPU
        module = SplitTableBatchedEmbeddingBagsCodegen(
            [(int(rows), int(dim), place, compute) for rows, dim in zip(tables.rows, tables.dim, strict=True)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.01,
            eps=1e-8,
            weights_precision=_DTYPES[tables.dtype],
            output_dtype=SparseType.FP32,
            pooling_mode=PoolingMode.SUM,
            device=self.device,
        )
        # Its own memory was never written: every page would be the same one, which a cache holds.
        for name, memory in (("weights", self._rows), ("momentum1", self._state)):
            held = getattr(module, f"{name}_{'dev' if cuda else 'host'}")
            held.data = memory.tensors([(1, held.numel())], held.dtype)[0].view(-1)
        return module


def bag_offsets(tables: TableSet, chosen: Int64Array) -> Int64Array:
    """Return int64 [bags + 1] offsets of the bags of the chosen tables, one after the other; bags of a table differ by
    at most one id."""
    ends = [np.zeros(1, np.int64)]
    for at in chosen.tolist():
        ids, bags = int(tables.ids[at]), int(tables.bags[at])
        ends.append(ends[-1][-1] + (np.arange(1, bags + 1) * ids) // bags)
    return np.concatenate(ends)
