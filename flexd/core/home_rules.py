"""Home rules, which ranks share the rows of a table, and answers, rows or sums of bags, which homes send back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexd.core.errors import ConfigError, TopologyError

if TYPE_CHECKING:  # it imports numpy, which would double the time of a client command
    from flexd.core.layout import RankLayout

SPREAD = "all"
"""The rule of a table that names none."""
COPIED = "every rank"
"""Rows are spread over all ranks, and every rank has a copy of each."""
_REMEDY = (
    f'"{SPREAD}" (spread over all ranks), "node:N" (over the ranks of node N), "rank:R" (whole on rank R) or '
    f'"{COPIED}" (copied to each)'
)


@dataclass(frozen=True)
class HomeRule:
    """The ranks on which the home copies of a table's rows are, dealt in turn by key.

    Attributes:
        kind: "all", "every rank", "node" or "rank".
        number: of the node or rank; 0 for the others.
    """

    kind: str = SPREAD
    number: int = 0

    @staticmethod
    def parse(text: str, table: str = "") -> HomeRule:
        """Read "all", "every rank", "node:N" or "rank:R".

        Raises:
            ConfigError: anything else; names the table.
        """
        kind, colon, number = text.partition(":")
        if text in (SPREAD, COPIED):
            return HomeRule(text)
        if kind not in ("node", "rank") or not colon or not (number.isascii() and number.isdigit()):
            where = f"table {table!r}: " if table else ""
            raise ConfigError(f"{where}home rule {text!r}", remedy=_REMEDY)
        return HomeRule(kind, int(number))

    def __str__(self) -> str:
        return self.kind if self.spread else f"{self.kind}:{self.number}"

    @property
    def spread(self) -> bool:
        """True if the home copies are dealt out over all ranks."""
        return self.kind in (SPREAD, COPIED)

    @property
    def copied(self) -> bool:
        """True if every rank has a copy of each row."""
        return self.kind == COPIED

    def ranks(self, layout: RankLayout) -> range:
        """Return the ranks that share the rows.

        Raises:
            TopologyError: the job has no such node or rank.
        """
        if self.spread:
            return range(layout.world_size)
        most = layout.nodes if self.kind == "node" else layout.world_size
        if self.number >= most:
            raise TopologyError(
                f"home rule {self} in a job of {layout.nodes} nodes x {layout.local_ranks} ranks",
                remedy=f"a {self.kind} below {most}",
            )
        first = self.number * layout.local_ranks if self.kind == "node" else self.number
        return range(first, first + (layout.local_ranks if self.kind == "node" else 1))


ROWS, SUMS = "rows", "sums"


@dataclass(frozen=True)
class TableAnswers:
    """The pooled tables of a trainer, and those of them that answer by sums."""

    pooled: frozenset[int] = frozenset()
    by_sums: frozenset[int] = frozenset()


NO_POOLED = TableAnswers()
