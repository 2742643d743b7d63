"""Predict the step time of a job that is known by its list of tables, as TorchRec's planner knows it.

Nothing is replayed: loads are expectations (``flexd.planner.tables``), for an exponent of Zipf's law and for two beside
it where the accesses are not known. Latencies are left out, and so is run-ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flexd.core.layout import RankLayout
from flexd.planner.tables.chain_costs import chain_options
from flexd.planner.tables.options import TableOptions
from flexd.planner.tables.rank_loads import Pieces, RankLoads
from flexd.planner.tables.sharding import TableStatistics, listed_pieces, listed_work, torchrec_work
from flexd.planner.tables.solve import EVALUATIONS, place_tables
from flexd.planner.tables.table_list import ListedTable
from flexd.planner.tables.torchrec_costs import OPTIONS, torchrec_options
from flexd.simulate.advice import HOURS_PER_DAY, Range, Saving, check_measured
from flexd.topology.cluster import Cluster

SKEW_RANGE = 0.15
"""Exponents this much smaller and larger make the range of an answer, of tables whose accesses are not measured."""
LISTED, ROW_WISE = "listed", "row_wise"
TITLES = {
    LISTED: "TorchRec, the plan of the list",
    ROW_WISE: "TorchRec, all tables row-wise",
    "planned": "TorchRec, sharded by flexd shard",
    "two_hops": "two hops with dedup (exchange: chain), rows",
    "homes_and_answers": "two hops, home rule and answer by table",
}


@dataclass(frozen=True)
class TablesPrediction(Saving):
    """One way to hold and exchange the tables.

    Attributes:
        embedding_seconds: of the busiest rank in a step, by the prices: exchange, look-up and update.
        memory_bytes: of the fullest rank, for rows, optimizer state and dense gradients.
    """

    title: str
    embedding_seconds: float
    memory_bytes: float


@dataclass(frozen=True)
class TablesAdvice:
    """Answer to: is flexd worth it for the job with these tables.

    Attributes:
        now: key of today's way in ``predictions``.
        price_correction: factor of the prices, from the measured computing; 1 without it.
        predictions: by name.
        best: name of the one whose low end saves most; None if none pays by ``worth``.
    """

    tables: tuple[ListedTable, ...]
    layout: RankLayout
    now: str
    step_seconds: float
    price_correction: float
    price_error: float
    worth: float
    predictions: Mapping[str, TablesPrediction]
    best: str | None

    @property
    def embedding_seconds(self) -> float:
        """Seconds of today's embeddings by the corrected prices."""
        return self.price_correction * self.predictions[self.now].embedding_seconds

    @property
    def prices_fit(self) -> bool:
        return self.embedding_seconds < self.step_seconds


def advise_on_tables(
    tables: Sequence[ListedTable],
    layout: RankLayout,
    cluster: Cluster,
    memory_bytes: float,
    statistics: TableStatistics | None = None,
    *,
    step_seconds: float,
    computing_seconds: float | None = None,
    price_error: float = 0.15,
    worth: float = 0.02,
    evaluations: int = EVALUATIONS,
) -> TablesAdvice:
    """Price today's sharding and what flexd offers instead.

    Args:
        memory_bytes: of a rank, for plans; today's needs what it needs.
        step_seconds, computing_seconds, price_error, worth: as in ``flexd.simulate.advice.advise``. Look-up and update
            of rows count as embeddings here, not as computing.
        evaluations: of single moves in the search of each plan.

    Raises:
        ConfigError: a number is out of range, or there is one rank.
        PlanError: no plan fits into the memory, or the list's plan is of more ranks.
    """
    check_measured(layout, step_seconds, computing_seconds)
    statistics = statistics or TableStatistics()
    skews = (statistics.zipf, max(0.0, statistics.zipf - SKEW_RANGE), statistics.zipf + SKEW_RANGE)
    by_skew = [_Loads.of(tables, layout, cluster, replace(statistics, zipf=zipf)) for zipf in skews]
    ways = _ways(by_skew[0], tables, layout, memory_bytes, evaluations)
    now = LISTED if LISTED in ways else ROW_WISE
    seconds = {name: [loads.seconds(way) for loads in by_skew] for name, way in ways.items()}
    correction = 1.0
    if computing_seconds is not None:
        correction = (step_seconds - computing_seconds) / seconds[now][0]
    found = {}
    for name, way in ways.items():
        saved = [correction * (today - mine) for today, mine in zip(seconds[now], seconds[name], strict=True)]
        if computing_seconds is not None:
            # Whatever the skew is: today's embeddings take the rest of the measured step.
            saved = [(step_seconds - computing_seconds) * (1 - mine / today) for today, mine in zip(
                seconds[now], seconds[name], strict=True)]  # fmt: skip
        ends = [one * factor for one in saved for factor in (1 - price_error, 1 + price_error)]
        found[name] = _prediction(
            TITLES[name], seconds[name][0], Range(saved[0], min(ends), max(ends)), step_seconds, layout,
            by_skew[0].inter_node_bytes(way), by_skew[0].memory(way),
        )  # fmt: skip
    fits = correction * seconds[now][0] < step_seconds
    worthwhile = [name for name, one in found.items() if fits and one.pays and one.saved_share.expected >= worth]
    return TablesAdvice(
        tuple(tables), layout, now, step_seconds, correction, price_error, worth, found,
        max(worthwhile, key=lambda name: found[name].saved_seconds.low, default=None),
    )  # fmt: skip


def _prediction(
    title: str, embeddings: float, saved: Range, step_seconds: float, layout: RankLayout, between: float, memory: float
) -> TablesPrediction:
    share = saved.scaled(1 / step_seconds)
    return TablesPrediction(
        step_seconds=Range(step_seconds - saved.expected, step_seconds - saved.high, step_seconds - saved.low),
        saved_seconds=saved,
        saved_share=share,
        gpu_hours_per_day=share.scaled(HOURS_PER_DAY * layout.world_size),
        inter_node_bytes=between,
        title=title,
        embedding_seconds=embeddings,
        memory_bytes=memory,
    )


@dataclass(frozen=True)
class _Way:
    """Attributes: torchrec: whose exchange it is."""

    torchrec: bool
    pieces: Pieces


@dataclass(frozen=True)
class _Loads:
    """Loads of all tables under one skew, in TorchRec's exchange and in the chain."""

    layout: RankLayout
    torchrec: TableOptions
    chain: TableOptions

    @classmethod
    def of(
        cls, tables: Sequence[ListedTable], layout: RankLayout, cluster: Cluster, statistics: TableStatistics
    ) -> _Loads:
        cluster = cluster.of_layout(layout.nodes, layout.local_ranks)
        listed = listed_pieces(tables, layout)
        options = OPTIONS if listed is None else listed[0]
        dims = [table.dim for table in tables]
        return cls(
            layout,
            torchrec_options(torchrec_work(tables, layout, statistics), dims, layout, cluster, options=options),
            chain_options(listed_work(tables, layout, statistics), layout, cluster),
        )

    def _of(self, way: _Way) -> tuple[TableOptions, RankLoads]:
        options = self.torchrec if way.torchrec else self.chain
        return options, RankLoads.of(options, self.layout, np.full(self.layout.world_size, np.inf), way.pieces)

    def seconds(self, way: _Way) -> float:
        options, loads = self._of(way)
        used = {options.options[at].answer for at in np.unique(way.pieces.option)}
        return loads.seconds() + sum(fixed for answer, fixed in options.answer_seconds if answer in used)

    def inter_node_bytes(self, way: _Way) -> float:
        options, loads = self._of(way)
        axes = [at for at, phase in enumerate(options.axis_phase) if options.phases[phase].endswith("inter_node")]
        return float(loads.total[axes[::2]].sum())

    def memory(self, way: _Way) -> float:
        return float(self._of(way)[1].total[-1].max())


def _ways(
    loads: _Loads, tables: Sequence[ListedTable], layout: RankLayout, memory_bytes: float, evaluations: int
) -> dict[str, _Way]:
    every, zero = np.arange(len(tables)), np.zeros(len(tables), np.int64)
    ways = {}
    if (listed := listed_pieces(tables, layout)) is not None:
        ways[LISTED] = _Way(torchrec=True, pieces=listed[1])
    ways[ROW_WISE] = _Way(torchrec=True, pieces=Pieces(every, zero, zero))
    ways["planned"] = _Way(True, place_tables(loads.torchrec, layout, memory_bytes, evaluations=evaluations).pieces)
    ways["two_hops"] = _Way(torchrec=False, pieces=Pieces(every, zero, zero))
    chosen = place_tables(loads.chain, layout, memory_bytes, evaluations=evaluations)
    ways["homes_and_answers"] = _Way(torchrec=False, pieces=chosen.pieces)
    return ways
