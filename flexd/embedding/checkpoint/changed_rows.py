"""Which home rows were changed since they were last saved."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from flexd.embedding.replicas.touched_rows import RowBits, mark, none_set, positions_of, union_of
from flexd.embedding.step import StepMoments
from flexd.embedding.store.entry_pool import BLOCK
from flexd.embedding.store.store import GroupStore

_READ_BLOCKS = 1 << 14
"""Blocks of 64 rows whose changed rows are listed at once."""


class ChangedRows(StepMoments):
    """Home rows of all dim-groups that were changed: a byte a row.

    Nothing is allocated and nothing is noted before ``begin``. Thread-safe on the host; on an accelerator updates of
    several streams set bytes, in any order.
    """

    def __init__(self, stores: Sequence[GroupStore]) -> None:
        self._stores = list(stores)
        # Replica slots have bits too, which nobody reads: an update does not have to leave them out.
        blocks = [-(-(store.home_rows + store.replica_slots) // BLOCK) for store in self._stores]
        self._first_blocks = [0, *accumulate(blocks)]
        self._marks: RowBits | None = None
        self._all = False
        self._lock = threading.Lock()
        self.working = self

    @property
    def active(self) -> bool:
        return self._marks is not None

    @property
    def all_changed(self) -> bool:
        """True if rows were changed in a way that does not tell which."""
        return self._all

    def begin(self) -> None:
        """Note changed rows from now on, and forget those noted before."""
        with self._lock:
            self._marks, self._all = self._none(), False

    def end(self) -> None:
        """Note nothing any more."""
        with self._lock:
            self._marks, self._all = None, False

    def changed(self, parts: Sequence[tuple[int, torch.Tensor]], *, all_rows: bool = False) -> None:
        """Note changed rows, with a number of kernels that does not depend on the dim-groups."""
        if self._marks is None:
            return
        self._all |= all_rows
        if not parts:
            return
        slots = torch.cat([slots for _, slots in parts]) if len(parts) > 1 else parts[0][1]
        firsts = [self._first_blocks[group] * BLOCK for group, _ in parts]
        if any(firsts):
            both = torch.tensor([firsts, [len(of_part) for _, of_part in parts]], device=slots.device)
            slots = slots + torch.repeat_interleave(both[0], both[1], output_size=len(slots))
        with self._lock:
            if self._marks is not None:
                mark(self._marks, slots)

    def drain(self) -> DrainedRows:
        """Return the changed rows and note further ones anew."""
        with self._lock:
            if self._marks is None:
                raise AssertionError("no rows are noted")
            drained = DrainedRows(self._stores, self._first_blocks, self._marks, self._all)
            self._marks, self._all = self._none(), False
        return drained

    def restore(self, drained: DrainedRows) -> None:
        """Note rows again that were drained and could not be saved."""
        with self._lock:
            if self._marks is not None:
                self._marks, self._all = union_of([self._marks, drained.marks]), self._all or drained.all_rows

    def _none(self) -> RowBits:
        return none_set(self._first_blocks[-1] * BLOCK, self._stores[0].rows.device)


@dataclass(frozen=True)
class DrainedRows:
    """Changed rows at one time.

    Attributes:
        marks: of all dim-groups, whose blocks begin at ``first_blocks``.
        all_rows: all home rows.
    """

    stores: Sequence[GroupStore]
    first_blocks: Sequence[int]
    marks: RowBits
    all_rows: bool

    def slots(self, group: int, most: int) -> Iterator[torch.Tensor]:
        """Yield int64 [n] home slots of a dim-group, ascending, at most ``most`` at a time."""
        home_rows, device = self.stores[group].home_rows, self.marks.device
        if self.all_rows:
            for start in range(0, home_rows, most):
                yield torch.arange(start, min(home_rows, start + most), device=device)
            return
        first, end = self.first_blocks[group : group + 2]
        left = torch.empty(0, dtype=torch.int64, device=device)
        for block in range(first, end, _READ_BLOCKS):
            found = positions_of(self.marks, block, min(end, block + _READ_BLOCKS)) - first * BLOCK
            left = torch.cat([left, found[found < home_rows]])
            while len(left) >= most:
                yield left[:most]
                left = left[most:]
        if len(left):
            yield left
