"""A block of rows of a table that go from one home rule to another."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from flexd.core.home_rules import HomeRule


@dataclass(frozen=True)
class HomeBlock:
    """Rows ``[first_row, end_row)`` of a table, which have their homes by ``old`` before and by ``new`` after.

    A table has at most two rules at a time: its first rows, up to a boundary, have one, the others another. A block
    raises the boundary, or lowers it on the way back.
    """

    table: int
    old: HomeRule
    new: HomeRule
    first_row: int
    end_row: int

    def __len__(self) -> int:
        return self.end_row - self.first_row

    @property
    def reversed(self) -> HomeBlock:
        """The block that takes the rows back."""
        return HomeBlock(self.table, self.new, self.old, self.first_row, self.end_row)

    def divided(self, rows: int) -> list[HomeBlock]:
        """Return blocks of at most ``rows`` rows, ascending, with the same rows."""
        starts = range(self.first_row, self.end_row, max(1, rows))
        return [
            HomeBlock(self.table, self.old, self.new, start, min(start + starts.step, self.end_row)) for start in starts
        ]

    def digest_change(self) -> int:
        """Return the change of ``Placement.digest`` (mod 2^64): it depends on the rule of each row alone, not on the
        blocks in which rows got it."""
        rows = self.end_row**2 - self.first_row**2  # the sum of 2 row + 1
        return rows * (self._hash(self.new) - self._hash(self.old)) % 2**64

    def _hash(self, rule: HomeRule) -> int:
        return int.from_bytes(hashlib.blake2b(f"{self.table} {rule}".encode(), digest_size=8).digest(), "little")
