"""Blocks of rows that go from one home rule to another, and the rules that tables have on the way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import ConfigError, PlacementError
from flexd.core.home_rules import HomeRule
from flexd.core.layout import RankLayout


@dataclass(frozen=True)
class HomeBlock:
    """Rows ``[first_row, end_row)`` of a table, which have their homes by ``old`` before and by ``new`` after.

    A table has at most two rules at a time: its first rows, up to a boundary, have one, the others another. A block
    raises the boundary, or lowers it on the way back.

    Attributes:
        rows: of the table.
        lowers: the block lowers the boundary.
    """

    table: int
    rows: int
    old: HomeRule
    new: HomeRule
    first_row: int
    end_row: int
    lowers: bool = False

    def __len__(self) -> int:
        return self.end_row - self.first_row

    def split(self, rows: int) -> tuple[HomeBlock, HomeBlock]:
        """Return the block of the ``rows`` rows that go first, and that of the others; one of them may have no rows."""
        at = self.end_row - rows if self.lowers else self.first_row + rows
        below = HomeBlock(self.table, self.rows, self.old, self.new, self.first_row, at, self.lowers)
        above = HomeBlock(self.table, self.rows, self.old, self.new, at, self.end_row, self.lowers)
        return (above, below) if self.lowers else (below, above)

    def divided(self, rows: int) -> Iterator[HomeBlock]:
        """Yield blocks of at most ``rows`` rows, in the order in which they can be applied."""
        left = self
        while len(left):
            part, left = left.split(min(max(1, rows), len(left)))
            yield part

    def digest_change(self) -> int:
        """Return the change of ``Placement.digest`` (mod 2^64): it depends on the rule of each row alone, not on the
        blocks in which rows got it."""
        return _digest(self.table, self.new, self.first_row, self.end_row) - _digest(
            self.table, self.old, self.first_row, self.end_row
        )

    def to_text(self) -> str:
        numbers = (self.table, self.rows, str(self.old), str(self.new), self.first_row, self.end_row, int(self.lowers))
        return json.dumps(numbers, separators=(",", ":"))

    @staticmethod
    def of_text(text: str) -> HomeBlock:
        """Return the block of ``to_text``. Raises PlacementError: it is none."""
        table, rows, old, new, first_row, end_row, lowers = _fields(text, (int, int, str, str, int, int, int))
        return HomeBlock(table, rows, _rule(old), _rule(new), first_row, end_row, bool(lowers))


@dataclass(frozen=True)
class ChangedRule:
    """A table whose rule differs from that in the table list.

    Attributes:
        rows: of the table.
        first: its rule in the table list.
        upper: rule of the rows from ``boundary`` on.
        lower: rule of the rows below; None if ``boundary`` is 0.
    """

    table: int
    rows: int
    first: HomeRule
    upper: HomeRule
    lower: HomeRule | None = None
    boundary: int = 0

    def after(self, block: HomeBlock) -> ChangedRule:
        """Return the rules after a block.

        Raises:
            PlacementError: the rows do not have the rule that the block states, or are not next to the boundary.
        """
        upper, lower, boundary = self.upper, self.lower, self.boundary
        valid = block.table == self.table and block.rows == self.rows and block.old != block.new
        valid = valid and 0 <= block.first_row < block.end_row <= self.rows
        if block.lowers:
            valid = valid and (block.old, block.new, block.end_row) == (lower, upper, boundary)
            lower, boundary = block.old, block.first_row
        else:
            valid = valid and (block.old, block.first_row) == (upper, boundary) and lower in (None, block.new)
            lower, boundary = block.new, block.end_row
        if not valid:
            raise PlacementError(
                f"rows {block.first_row} to {block.end_row} of table {block.table} cannot go from rule {block.old} to "
                f"{block.new}: it has {self.rows} rows and {self}",
                remedy="finish the change that has begun, or take it back",
            )
        if boundary == self.rows:
            return ChangedRule(self.table, self.rows, self.first, lower)
        return ChangedRule(self.table, self.rows, self.first, upper, lower if boundary else None, boundary)

    def blocks_to(self, upper: HomeRule, lower: HomeRule | None = None, boundary: int = 0) -> list[HomeBlock]:
        """Return blocks, one after another, after which the table has these rules: through a change that has begun, or
        back, whichever leads there."""
        blocks = []
        now = self
        while (now.upper, now.lower, now.boundary) != (upper, lower, boundary):
            if now.lower is None:
                goal, end = (upper, self.rows) if now.upper != upper else (lower, boundary)
                assert goal is not None  # noqa: S101
                block = HomeBlock(self.table, self.rows, now.upper, goal, 0, end)
            elif (now.upper, now.lower) == (upper, lower) and now.boundary < boundary:
                block = HomeBlock(self.table, self.rows, now.upper, now.lower, now.boundary, boundary)
            elif lower is None and now.lower == upper:
                block = HomeBlock(self.table, self.rows, now.upper, now.lower, now.boundary, self.rows)
            else:
                least = boundary if (now.upper, now.lower) == (upper, lower) else 0
                block = HomeBlock(self.table, self.rows, now.lower, now.upper, least, now.boundary, lowers=True)
            blocks.append(block)
            now = now.after(block)
        return blocks

    def home_ranks(
        self, layout: RankLayout, rows: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return int64 [n] home ranks of int64 [n] rows, given their keys."""
        upper = self.upper.ranks(layout)
        found: npt.NDArray[np.int64] = upper.start + keys % len(upper)
        if self.lower is not None:
            lower = self.lower.ranks(layout)
            found = np.where(rows < self.boundary, lower.start + keys % len(lower), found)
        return found

    def digest(self) -> int:
        """Return the part of this table in ``Placement.digest`` (mod 2^64)."""
        found = -_digest(self.table, self.first, 0, self.rows) + _digest(
            self.table, self.upper, self.boundary, self.rows
        )
        return found if self.lower is None else found + _digest(self.table, self.lower, 0, self.boundary)

    def __str__(self) -> str:
        return f"the home rule {self.rules}"

    @property
    def rules(self) -> str:
        """The rule, or both and the row at which they meet, in words."""
        return (
            f"{self.upper}"
            if self.lower is None
            else f"{self.lower} below row {self.boundary}, {self.upper} from there"
        )

    def to_text(self) -> str:
        lower = "" if self.lower is None else str(self.lower)
        fields = (self.table, self.rows, str(self.first), str(self.upper), lower, self.boundary)
        return json.dumps(fields, separators=(",", ":"))

    @staticmethod
    def of_text(text: str) -> ChangedRule:
        """Return the rules of ``to_text``. Raises PlacementError: they are none."""
        table, rows, first, upper, lower, boundary = _fields(text, (int, int, str, str, str, int))
        found = ChangedRule(
            table, rows, _rule(first), _rule(upper), _rule(lower) if lower else None, boundary if lower else 0
        )
        if table < 0 or not (0 < boundary < rows if lower else boundary == 0 < rows):
            raise PlacementError(f"rules of a table that cannot be: {text[:200]}")
        return found


@dataclass(frozen=True)
class ChangedRules:
    """The tables whose rules differ from those in the table list, ascending."""

    tables: tuple[ChangedRule, ...] = ()

    def of_table(self, table: int) -> ChangedRule | None:
        return next((one for one in self.tables if one.table == table), None)

    def after(self, block: HomeBlock) -> ChangedRules:
        """Return the rules after a block. Raises PlacementError as ``ChangedRule.after``.

        The first rule of a table that has not changed is not known here, and is the one that the block states.
        """
        before = self.of_table(block.table) or ChangedRule(block.table, block.rows, block.old, block.old)
        after = before.after(block)
        others = [one for one in self.tables if one.table != block.table]
        if after.lower is not None or after.upper != after.first:
            others.append(after)
        return ChangedRules(tuple(sorted(others, key=lambda one: one.table)))

    def blocks_to(self, target: ChangedRules) -> list[HomeBlock]:
        """Return blocks, one after another, that lead to other rules."""
        blocks: list[HomeBlock] = []
        for table in sorted({one.table for one in (*self.tables, *target.tables)}):
            now, then = self.of_table(table), target.of_table(table)
            known = now or then
            assert known is not None  # noqa: S101
            unchanged = ChangedRule(table, known.rows, known.first, known.first)
            now, then = now or unchanged, then or unchanged
            blocks += now.blocks_to(then.upper, then.lower, then.boundary)
        return blocks

    def digest(self) -> int:
        """Return the part of the rules in ``Placement.digest`` (mod 2^64): 0 while none has changed."""
        return sum(one.digest() for one in self.tables) % 2**64

    def to_texts(self) -> tuple[str, ...]:
        return tuple(one.to_text() for one in self.tables)

    @staticmethod
    def of_texts(texts: Sequence[str]) -> ChangedRules:
        """Return the rules of ``to_texts``. Raises PlacementError: they are none."""
        found = [ChangedRule.of_text(text) for text in texts]
        tables = [one.table for one in found]
        if tables != sorted(set(tables)):
            raise PlacementError("rules of tables that are not in their order")
        return ChangedRules(tuple(found))


NO_CHANGES = ChangedRules()


def _fields(text: str, types: tuple[type, ...]) -> list[Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise PlacementError(f"no rules of a table: {text[:200]}") from error
    if not isinstance(fields, list) or [type(one) for one in fields] != list(types):
        raise PlacementError(f"no rules of a table: {text[:200]}")
    return fields


def _rule(text: str) -> HomeRule:
    try:
        return HomeRule.parse(text)
    except ConfigError as error:
        raise PlacementError(error.message) from error


def _digest(table: int, rule: HomeRule, first_row: int, end_row: int) -> int:
    rows = end_row**2 - first_row**2  # the sum of 2 row + 1
    return rows * _hash(table, rule) % 2**64


@cache
def _hash(table: int, rule: HomeRule) -> int:
    return int.from_bytes(hashlib.blake2b(f"{table} {rule}".encode(), digest_size=8).digest(), "little")
