"""Home rows that have changed since the last checkpoint of a series."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from flexd.embedding.rank_rows import RankRows
from flexd.embedding.replicas.touched_rows import RowBits, mark, none_set, positions_of, union_of
from flexd.embedding.step import StepMoments
from flexd.embedding.store.directory import BLOCK
from flexd.embedding.store.store import GroupStore

# Blocks of 64 rows whose changed rows are listed at once.
_READ_BLOCKS = 1 << 14


def _first_blocks(stores: Sequence[GroupStore]) -> list[int]:
    """Return at which block of 64 bits each dim-group begins, and the number of blocks.

    Replica slots have bits too, which nobody reads: an update does not have to leave them out.
    """
    return [0, *accumulate(-(-(store.home_rows + store.replica_slots) // BLOCK) for store in stores)]


class ChangedRows(StepMoments):
    """Home rows of all dim-groups that were changed: a byte per row.

    Nothing is allocated and nothing is noted before ``begin``. Thread-safe on the host; on an accelerator updates of
    several streams set bytes, in any order.
    """

    def __init__(self, stores: Sequence[GroupStore]) -> None:
        self._stores = list(stores)
        self._firsts = [block * BLOCK for block in _first_blocks(stores)]
        self._marks: RowBits | None = None
        self.all_changed = False
        """True if rows were changed in a way that does not tell which."""
        self._lock = threading.RLock()
        self.working = self

    @property
    def active(self) -> bool:
        return self._marks is not None

    def begin(self) -> None:
        """Note changed rows from now on, and forget those noted before."""
        with self._lock:
            self._marks, self.all_changed = none_set(self._firsts[-1], self._stores[0].rows.device), False

    def end(self) -> None:
        """Stop noting, and forget the rows noted before."""
        with self._lock:
            self._marks, self.all_changed = None, False

    def changed(self, parts: Sequence[tuple[int, torch.Tensor]], *, all_rows: bool = False) -> None:
        """Note changed rows, with a number of kernels that does not depend on the dim-groups."""
        if self._marks is None:
            return
        self.all_changed |= all_rows
        if not parts:
            return
        slots = torch.cat([slots for _, slots in parts]) if len(parts) > 1 else parts[0][1]
        firsts = [self._firsts[group] for group, _ in parts]
        if any(firsts):
            both = torch.tensor([firsts, [len(of_part) for _, of_part in parts]], device=slots.device)
            slots = slots + torch.repeat_interleave(both[0], both[1], output_size=len(slots))
        with self._lock:
            if self._marks is not None:
                mark(self._marks, slots)

    def regrouped(self, before: RankRows, after: RankRows) -> bool:
        """Note the same rows in other dim-groups, and all rows of tables whose optimizer state begins anew."""
        with self._lock:
            old, old_firsts = self._marks, self._firsts
            self._stores, self._firsts = list(after.stores), [block * BLOCK for block in _first_blocks(after.stores)]
            if old is None:
                return True
            self._marks = none_set(self._firsts[-1], old.device)
            for group, store in enumerate(after.stores):
                for table in store.group.tables:
                    was = int(before.keyspace.group_of_table[table])
                    here, there = before.homes.run(table, store.rank), after.homes.run(table, store.rank)
                    first, began = self._firsts[group] + there.first_slot, old_firsts[was] + here.first_slot
                    noted = self._marks[first : first + len(there.rows)]
                    if after.trained[group] and not before.trained[was]:
                        noted.fill_(1)
                    else:
                        noted.copy_(old[began : began + len(here.rows)])
        return True

    def drain(self) -> HomeRows:
        """Return the changed rows and note further ones anew."""
        with self._lock:
            drained = HomeRows(self._stores, None if self.all_changed else self._marks)
            self.begin()
        return drained

    def restore(self, drained: HomeRows) -> None:
        """Note rows again that were drained and could not be saved."""
        with self._lock:
            if drained.marks is None or drained.stores is not self._stores:  # of other dim-groups
                self.all_changed = self.active
            elif self._marks is not None:
                self._marks = union_of([self._marks, drained.marks])


@dataclass(frozen=True)
class HomeRows:
    """Home rows of this rank.

    Attributes:
        marks: of the rows, among the slots of all dim-groups; None: all home rows.
        sets: bool [sets of this rank], of unbounded ids; None: all.
    """

    stores: Sequence[GroupStore]
    marks: RowBits | None
    sets: torch.Tensor | None = None

    def slots(self, group: int, most: int) -> Iterator[torch.Tensor]:
        """Yield int64 [n] home slots of a dim-group, ascending, at most ``most`` at a time."""
        home_rows, device = self.stores[group].home_rows, self.stores[group].rows.device
        if self.marks is None:
            for start in range(0, home_rows, most):
                yield torch.arange(start, min(home_rows, start + most), device=device)
            return
        first, end = _first_blocks(self.stores)[group : group + 2]
        left = torch.empty(0, dtype=torch.int64, device=device)
        for block in range(first, end, _READ_BLOCKS):
            found = positions_of(self.marks, block, min(end, block + _READ_BLOCKS)) - first * BLOCK
            left = torch.cat([left, found[found < home_rows]])
            while len(left) >= most:
                yield left[:most]
                left = left[most:]
        if len(left):
            yield left
