"""The sets of slots of all tables of unbounded ids, and the set of each id.

A hash of the id picks a set of at most 64 slots, and each slot is a row of the table. The number of sets depends on the
rows alone, so that who shares a set with whom, and every decision, is the same on any number of ranks. Sets are dealt
to the ranks one after another: the *home* of a set decides about its slots alone.

Row ``r`` of a table with ``s`` sets is slot ``r // s`` of its set ``r % s``; the last row of the table is no slot but
the row that all ids without one share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from flexd.embedding.row_hashes import splitmix64

SLOTS = 64
"""Most slots of a set."""


@dataclass(frozen=True)
class UnboundedTable:
    """A table of unbounded ids.

    Attributes:
        table: its index in the key space.
        rows: with the shared one.
        first_key: key of row 0.
        admit_after: look-ups after which an id gets a row of its own, 1 or 2.
    """

    name: str
    table: int
    rows: int
    first_key: int
    admit_after: int

    @property
    def slots(self) -> int:
        return self.rows - 1

    @property
    def sets(self) -> int:
        return -(-self.slots // SLOTS)


class IdSets:
    """Numbers the sets of several tables, those first whose ids are admitted at the second look-up.

    Attributes:
        tables: in the order of their sets.
        index: number in ``tables`` of each by its name.
        total: number of sets.
        gated: number of sets of tables with ``admit_after`` 2.
        ends: int64 [tables], the sets behind those of each.
    """

    def __init__(self, tables: Sequence[UnboundedTable], device: torch.device) -> None:
        self.tables = tuple(sorted(tables, key=lambda table: -table.admit_after))
        self.index = {table.name: number for number, table in enumerate(self.tables)}
        firsts = list(accumulate((table.sets for table in self.tables), initial=0))
        self.total = firsts[-1]
        self.gated = sum(table.sets for table in self.tables if table.admit_after > 1)
        columns = [(first, t.sets, t.slots, t.first_key) for first, t in zip(firsts, self.tables, strict=False)]
        self._columns = torch.tensor(columns, device=device)
        self._first = self._columns[:, 0].contiguous()
        self.ends = self._first + self._columns[:, 1]

    def of_ids(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Return int64 [n], the sets of int64 [n] ids of the tables of int64 [n] ``numbers`` in ``tables``."""
        return self.of_hashes(self.hashes(ids), numbers)

    @staticmethod
    def hashes(ids: torch.Tensor) -> torch.Tensor:
        """Return int64 [n] hashes of int64 [n] ids, distinct ones of distinct ids."""
        return splitmix64(ids.clone())

    def of_hashes(self, hashes: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Return what ``of_ids`` does, by the ``hashes`` of the ids."""
        first, count, _, _ = self._of(numbers)
        positive = (hashes >> 1).bitwise_and_(2**63 - 1)
        return positive.remainder_(count).add_(first)

    def of_each(self, column: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Return int64 [n], the value of int64 [tables] ``column`` for each of int64 [n] ``numbers`` in ``tables``."""
        return column.expand(numbers.shape) if len(self.tables) == 1 else column.index_select(0, numbers)

    def _of(self, numbers: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return for each of int64 [n] ``numbers`` in ``tables`` the first set, the number of sets, that of slots, and
        the first key: int64 [n]."""
        if len(self.tables) == 1:
            return [column.expand(numbers.shape) for column in self._columns.unbind(1)]
        return self._columns.index_select(0, numbers).unbind(1)

    def of_table(self, places: torch.Tensor, number: int) -> torch.Tensor:
        """Return int64 [n], the sets of int64 [n] places among those of a table."""
        found: torch.Tensor = self._first[number] + places
        return found

    def of_rank(self, number: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int64 [n] ascending sets of a table whose home is a rank, and their int64 [n] places among those of
        the table."""
        first, count = int(self._first[number]), self.tables[number].sets
        sets = torch.arange(first + (rank - first) % world_size, first + count, world_size, device=self._first.device)
        return sets, sets - first

    def numbers(self, sets: torch.Tensor) -> torch.Tensor:
        """Return int64 [n], the table of each of int64 [n] sets."""
        if len(self.tables) == 1:
            return torch.zeros_like(sets)
        return torch.searchsorted(self._first, sets, right=True) - 1

    def slots(self, sets: torch.Tensor) -> torch.Tensor:
        """Return int64 [n], the number of slots of each of int64 [n] sets."""
        first, count, slots, _ = self._of(self.numbers(sets))
        return torch.div(slots - (sets - first) + count - 1, count, rounding_mode="floor")

    def keys(self, sets: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return int64 [n] keys of the rows of int64 [n] slots in int64 [n] sets; of -1 the key of the shared row."""
        first, count, shared, first_key = self._of(self.numbers(sets))
        return torch.where(slots < 0, shared, slots * count + sets - first).add_(first_key)

    def places(self, rows: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (int64 [n] sets, int64 [n] slots) of int64 [n] rows of a table, none of them the shared one."""
        count = self.tables[number].sets
        slots = torch.div(rows, count, rounding_mode="floor")
        return rows - slots * count + self._first[number], slots
