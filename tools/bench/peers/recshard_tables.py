"""Tables of a list for ``sections.recshard``, with a popularity that is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.planner.tables.sharding import ListedTable

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

LAYOUT = RankLayout(2, 8)
"""RecShard's experiments have 16 GPUs."""
EXPONENTS = (0.7, 1.4)
PLANNED, MOVED = "as planned", "moved"


@dataclass(frozen=True)
class Tables:
    """Pooled tables with a popularity each; rows are numbered from 0 over all tables, popular ones first in each.

    Attributes:
        row_bytes: float64[tables], read from a memory.
        stored_bytes: float64[tables], of a row with its optimizer state.
        accesses: float64[tables], of all ranks in one step.
        first: int64[tables + 1], first row.
        cumulative: for each table float64[rows], shares of the accesses added up.
    """

    keyspace: KeySpace
    row_bytes: Float64Array
    stored_bytes: Float64Array
    accesses: Float64Array
    first: Int64Array
    cumulative: list[Float64Array]

    @classmethod
    def of(cls, listed: Sequence[ListedTable], scale: float) -> Tables:
        rows = [max(10, round(table.rows / scale)) for table in listed]
        specs = [
            TableSpec(table.name, count, table.dim, "float16", "rowwise_adagrad")
            for table, count in zip(listed, rows, strict=True)
        ]
        exponents = np.random.default_rng(7).uniform(*EXPONENTS, len(listed))
        cumulative = []
        for count, exponent in zip(rows, exponents, strict=True):
            share = np.arange(1, count + 1) ** -exponent
            cumulative.append(np.cumsum(share / share.sum()))
        samples = listed[0].batch * LAYOUT.world_size / scale
        return cls(
            KeySpace(specs),
            np.array([float(spec.row_bytes) for spec in specs]),
            np.array([float(spec.row_bytes + spec.state_bytes) for spec in specs]),
            np.array([table.lookups * samples for table in listed]),
            np.concatenate([[0], np.cumsum(rows)]), cumulative,
        )  # fmt: skip

    def periods(self, steps: int, moved_share: float) -> Iterator[tuple[str, Int64Array]]:
        """Yield the period of each step ("" while frames warm up) and the rows that its samples access. In the period
        ``MOVED`` the rows of a share of the tables have changed places in the order of popularity."""
        generator = np.random.default_rng(1)
        tables = len(self.cumulative)
        moves = generator.permutation(tables) < round(moved_share * tables)
        order = [generator.permutation(len(cumulative)) for cumulative in self.cumulative]
        for period in np.repeat(["", PLANNED, MOVED], steps).tolist():
            accesses = []
            for table, number in enumerate(generator.poisson(self.accesses)):
                drawn = np.searchsorted(self.cumulative[table], generator.random(number))
                drawn = np.minimum(drawn, len(self.cumulative[table]) - 1)
                if period == MOVED and moves[table]:
                    drawn = order[table][drawn]
                accesses.append(self.first[table] + drawn)
            yield period, np.concatenate(accesses)
