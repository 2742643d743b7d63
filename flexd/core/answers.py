"""How the look-ups of pooled tables are answered, by rows or by sums at their homes, and changes of it in training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from flexd.core.errors import PlacementError

ROWS, SUMS = "rows", "sums"


@dataclass(frozen=True)
class AnswerChange:
    """Tables whose answer changes, or has changed since a job began. A table has one of two answers, so that a change
    names the one after it.

    Attributes:
        rows, sums: tables, ascending, that answer by rows, or by sums, after it, and in the other way before.

    Raises:
        PlacementError: tables that are not in their order, or a table twice.
    """

    rows: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        tables = [*self.rows, *self.sums]
        ordered = all(list(part) == sorted(set(part)) for part in (self.rows, self.sums))
        if not ordered or len(set(tables)) != len(tables) or min(tables, default=0) < 0:
            raise PlacementError(f"answers of tables {tables[:8]}, which are not in their order, or repeated")

    @staticmethod
    def of(rows: Iterable[int] = (), sums: Iterable[int] = ()) -> AnswerChange:
        """Return the change of tables in any order."""
        return AnswerChange(tuple(sorted(rows)), tuple(sorted(sums)))

    def __len__(self) -> int:
        """Return the number of tables."""
        return len(self.rows) + len(self.sums)

    def answer_of(self, table: int) -> str | None:
        """Return "rows" or "sums" after it; None for a table that does not change."""
        return ROWS if table in self.rows else SUMS if table in self.sums else None

    def by_table(self) -> dict[int, str]:
        """Return "rows" or "sums" after it of each of its tables, ascending."""
        return dict(sorted({**dict.fromkeys(self.rows, ROWS), **dict.fromkeys(self.sums, SUMS)}.items()))

    def part(self, start: int, stop: int) -> AnswerChange:
        """Return the change of some of its tables: places ``start`` to ``stop`` of ``rows`` with ``sums`` after it."""
        cut = len(self.rows)
        return AnswerChange(self.rows[start:stop], self.sums[max(0, start - cut) : max(0, stop - cut)])

    def of_tables(self, tables: Collection[int]) -> AnswerChange:
        """Return the change of some tables."""
        return AnswerChange(
            tuple(table for table in self.rows if table in tables),
            tuple(table for table in self.sums if table in tables),
        )

    def then(self, later: AnswerChange) -> AnswerChange:
        """Return both changes as one: a table that changes twice is as it was.

        Raises:
            PlacementError: a table answers already as ``later`` says.
        """
        rows, sums = set(self.rows), set(self.sums)
        if again := sorted(rows.intersection(later.rows) | sums.intersection(later.sums)):
            raise PlacementError(
                f"table {again[0]} answers by {self.answer_of(again[0])} already",
                remedy="make the change from the live placement",
            )
        back = rows.intersection(later.sums) | sums.intersection(later.rows)
        return AnswerChange.of((rows | set(later.rows)) - back, (sums | set(later.sums)) - back)

    def change_to(self, target: AnswerChange) -> AnswerChange:
        """Return the change that leads from here to ``target``, which begin with the same answers."""
        return AnswerChange(self.sums, self.rows).then(target)

    def digest_change(self) -> int:
        """Return the change of ``Placement.digest`` (mod 2^64)."""
        return (sum(map(_hash, self.sums)) - sum(map(_hash, self.rows))) % 2**64

    def to_text(self) -> str:
        """Return it as text; empty if no table changes."""
        return json.dumps([self.rows, self.sums], separators=(",", ":")) if len(self) else ""

    @staticmethod
    def of_text(text: str) -> AnswerChange:
        """Return the change of ``to_text``. Raises PlacementError: it is none."""
        try:
            parts = json.loads(text) if text else [[], []]
        except (ValueError, RecursionError) as error:
            raise PlacementError(f"no answers of tables: {text[:200]}") from error
        valid = isinstance(parts, list) and len(parts) == 2 and all(isinstance(part, list) for part in parts)
        if not valid or not all(type(table) is int for part in parts for table in part):
            raise PlacementError(f"no answers of tables: {text[:200]}")
        return AnswerChange(tuple(parts[0]), tuple(parts[1]))


NO_ANSWERS = AnswerChange()


@dataclass(frozen=True)
class TableAnswers:
    """The pooled tables of a trainer, and those of them that answer by sums."""

    pooled: frozenset[int] = frozenset()
    by_sums: frozenset[int] = frozenset()

    def after(self, change: AnswerChange, names: Sequence[str] = (), copied: Collection[int] = ()) -> TableAnswers:
        """Return the answers after a change.

        Args:
            names: of all tables, for errors.
            copied: tables that every rank has copies of by their home rule.

        Raises:
            PlacementError: a table is not pooled or has that answer already, or one of ``copied`` is to answer by sums.
        """

        def name(table: int) -> str:
            return repr(names[table]) if table < len(names) else str(table)

        if plain := sorted({*change.rows, *change.sums} - self.pooled):
            raise PlacementError(
                f"table {name(plain[0])} cannot change its answer: its look-ups are not pooled",
                remedy="name tables of the type flexd.EmbeddingBagTable in a collection that pools",
            )
        if again := sorted(self.by_sums.intersection(change.sums) | (set(change.rows) - self.by_sums)):
            raise PlacementError(
                f"table {name(again[0])} answers by {SUMS if again[0] in self.by_sums else ROWS} already",
                remedy="make the change from the live placement",
            )
        if kept := sorted(set(change.sums).intersection(copied)):
            raise PlacementError(
                f"table {name(kept[0])} cannot answer by sums, which make no use of its copies on every rank",
                remedy="give it another home rule in the trainer",
            )
        return replace(self, by_sums=(self.by_sums - set(change.rows)) | set(change.sums))

    def change_to(self, other: TableAnswers) -> AnswerChange:
        """Return the change that leads from here to ``other``."""
        return AnswerChange.of(self.by_sums - other.by_sums, other.by_sums - self.by_sums)


NO_POOLED = TableAnswers()


@cache
def _hash(table: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"answer {table}".encode(), digest_size=8).digest(), "little")
