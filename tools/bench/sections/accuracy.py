"""Accuracy of the counters by memory: error, hot-row recall, and the cost of a plan made from them.

The same accesses are counted exactly and in sketches of 1 to 1/50 of the exact counters' memory (4 bytes a row of all
tables of the job together); the memory in use is printed with every figure. A plan is made from each and priced under
the exact counts: the regret is its cost above the plan from the exact counts, in exposed seconds of a step; the capture
is its share of the saving of that plan against the chain without replicas. The cluster is a scale model
(``flexd.topology.scale``): latencies are those of a step as many times smaller as the table is smaller than the
design's example. A step has four micro-batches, on a link of a tenth of the preset's bandwidth and 200 us: where a plan
has something to save. It is priced for trained and for frozen tables.

An oracle of the same window knows more than any counters can know of the steps to come. So of the Zipf streams a second
window is drawn, and the plans of the first are priced under its counts: the miss of the plan from exact counts is what
the first window does not say about the second, and the added regret is what the sketch adds to it. It is checked
against that miss: counters need not be more precise than what they count.

DataSketches' count-min and frequent-items of the same nominal memory are fed the same ids in the same run. A trace is
one job of all its tables (docs/demo.md).
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasketches
import numpy as np
import numpy.typing as npt

from flexd.core.errors import SketchError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.model.workload import make_loads
from flexd.planner.plan import make_plan, placement_cost
from flexd.sketch.kinds import warm_up
from flexd.sketch.profile import Profile
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.types import SketchSettings
from flexd.stream.trace import load_trace
from flexd.stream.zipf import ZipfSampler
from flexd.topology.cluster import Cluster, Collective, CollectiveCurve, LinkModel
from flexd.topology.files import load_preset
from flexd.topology.scale import scale_model
from tools.bench.harness import Outcome, at_most, check

Int64Array = npt.NDArray[np.int64]

MEMORY_DIVISORS = (1, 2, 5, 10, 20, 50)
CHECKED_DIVISOR = 10
PERCENTILES = (0.01, 0.1, 1.0, 10.0, 50.0)
RECALL_PERCENT = (0.1, 1.0)
MESSAGE_IDS = 65_536
LEAST_COUNT_MIN_BYTES = 2**16
"""Least memory of one table: the fixed parts take 53 KiB."""
TRACE_MESSAGE_ACCESSES = 1_000_000
LAYOUT = RankLayout(12, 8)
DIM, DTYPE = 128, "float16"
EXAMPLE_ROWS = 80e6
ACCESSES_PER_ROW_AND_RANK = 15.5e6 / EXAMPLE_ROWS
"""Accesses of a training step in the design's example."""
REPLICA_SHARE = 0.01
FREQUENT_ITEMS_ENTRY_BYTES = 18
SLOW_LINK_SECONDS = 200e-6
SLOW_LINK_DIVISOR = 10
MICRO_BATCHES = 4
LEAST_SAVING = 0.01
"""Share of the step below which a plan of nothing passes the check of the regret."""


def slow_between_nodes(cluster: Cluster) -> Cluster:
    """Return the cluster with a slow link of high latency between its nodes."""
    full = cluster.inter_node

    def curve(collective: Collective) -> CollectiveCurve:
        points = tuple((size, bandwidth / SLOW_LINK_DIVISOR) for size, bandwidth in full.curve(collective).points)
        return CollectiveCurve(SLOW_LINK_SECONDS, points)

    slow = LinkModel(
        full.wire_bytes_per_second / SLOW_LINK_DIVISOR,
        all_to_all=curve(Collective.ALL_TO_ALL),
        all_reduce=curve(Collective.ALL_REDUCE),
        all_gather=curve(Collective.ALL_GATHER),
    )
    return replace(cluster, name=f"{cluster.name}-slow-link", inter_node=slow)


@dataclass(frozen=True)
class Setting:
    """Whether all tables are read only."""

    name: str
    frozen: bool = False

    @property
    def prefix(self) -> str:
        return f"{self.name}_"

    def shape(self, tables: tuple[TableSpec, ...]) -> TrainingShape:
        frozen = frozenset(table.name for table in tables) if self.frozen else frozenset[str]()
        return TrainingShape(micro_batches=MICRO_BATCHES, frozen_tables=frozen)


SETTINGS = (Setting("micro_batches"), Setting("frozen", frozen=True))


@dataclass(frozen=True)
class Case:
    """Accesses of a job in order: (table index, int64[n] rows).

    Attributes:
        following: those of the next window; empty if unknown.
    """

    name: str
    tables: tuple[TableSpec, ...]
    accesses: tuple[tuple[int, Int64Array], ...]
    following: tuple[tuple[int, Int64Array], ...] = ()

    def next_window(self) -> Case:
        return replace(self, accesses=self.following, following=())

    @property
    def rows(self) -> int:
        return sum(table.rows for table in self.tables)

    def counts(self) -> list[Int64Array]:
        """Return the exact counts of each table, int64[rows]."""
        result = [np.zeros(table.rows, dtype=np.int64) for table in self.tables]
        for table, rows in self.accesses:
            result[table] += np.bincount(rows, minlength=self.tables[table].rows)
        return result

    def ids(self) -> Int64Array:
        """Return all accesses as keys."""
        keyspace = KeySpace(self.tables)
        return np.concatenate([keyspace.keys(table, rows) for table, rows in self.accesses])


def zipf_case(exponent: float, rows: int, accesses: int) -> Case:
    random = np.random.default_rng(0)
    sampler = ZipfSampler(rows, exponent)
    ranks = sampler.sample(accesses, random)
    row_of = random.permutation(rows)
    windows = [((0, row_of[each]),) for each in (ranks, sampler.sample(accesses, random))]
    return Case(f"zipf_{exponent:g}", (TableSpec("t", rows, DIM, DTYPE),), *windows)


def trace_case(path: Path) -> Case:
    """Read all tables of a trace, in messages of consecutive accesses."""
    trace = load_trace(path)
    tables = tuple(
        TableSpec(name, int(rows), DIM, DTYPE) for name, rows in zip(trace.table_names, trace.table_rows, strict=True)
    )
    accesses = []
    for start in range(0, len(trace.row), TRACE_MESSAGE_ACCESSES):
        part = slice(start, start + TRACE_MESSAGE_ACCESSES)
        table, row = trace.table[part], trace.row[part].astype(np.int64)
        accesses += [(index, row[table == index]) for index in np.unique(table).tolist()]
    return Case("trace", tables, tuple(accesses))


def count(
    case: Case, memory_bytes: int, *, logarithmic: bool = True, max_hot_rows: int = SketchSettings.max_hot_rows
) -> SketchSet:
    sketches = SketchSet(case.tables, memory_bytes, None, logarithmic=logarithmic, max_hot_rows=max_hot_rows)
    for table, rows in case.accesses:
        for start in range(0, len(rows), MESSAGE_IDS):
            sketches.ingest(case.tables[table].name, rows[start : start + MESSAGE_IDS], 0, 1.0)
    return sketches


def count_exactly(case: Case) -> SketchSet:
    """Count exactly, and list every row in the profile: a plan is priced by the rows that the profile lists, so a row
    beyond the list, which another sketch may well list among equals, would be priced as if it had no copies."""
    return count(case, 16 * dense_bytes(case) + 2**26 * len(case.tables), max_hot_rows=case.rows)


def dense_bytes(case: Case) -> int:
    """Return the memory of exact counters of all tables: 4 bytes a row."""
    return 4 * case.rows


class Pricing:
    """Prices plans made from any profile under the exact counts.

    Args:
        following: exact counts of the next window; None: unknown.
    """

    def __init__(self, case: Case, exact: SketchSet, setting: Setting, following: SketchSet | None = None) -> None:
        self.setting = setting
        self.keyspace = KeySpace(case.tables)
        self.cluster = scale_model(
            slow_between_nodes(load_preset("azure-a100-200g")), max(1.0, EXAMPLE_ROWS / case.rows)
        )
        self.per_step = ACCESSES_PER_ROW_AND_RANK * case.rows * LAYOUT.world_size
        groups = self.keyspace.groups
        self.slots = [max(1, int(REPLICA_SHARE * group.rows)) for group in groups]
        self.shape = setting.shape(case.tables)
        self.loads = make_loads(exact.profile(self.per_step), self.keyspace, LAYOUT, self.shape)
        self.home = self.cost(Placement.empty())
        best = self.plan(exact.profile(self.per_step))
        self.best, self.best_rows = self.cost(best), len(best)
        self.next_loads, self.next_best, self.next_exact = None, 0.0, 0.0
        if following is not None:
            profile = following.profile(self.per_step)
            self.next_loads = make_loads(profile, self.keyspace, LAYOUT, self.shape)
            self.next_best = self.next_cost(self.plan(profile))
            self.next_exact = self.next_cost(best)

    def plan(self, profile: Profile) -> Placement:
        return make_plan(
            profile, self.keyspace, LAYOUT, self.cluster, self.slots, Placement.empty(), plan_id="bench", parent_id="",
            topology_generation=1, horizon_steps=1e9, now_unix_seconds=0.0, reason="bench", shape=self.shape,
        ).target  # fmt: skip

    def cost(self, placement: Placement) -> float:
        return placement_cost(self.loads, placement, self.keyspace, LAYOUT, self.cluster).exposed_seconds

    def next_cost(self, placement: Placement) -> float:
        assert self.next_loads is not None
        return placement_cost(self.next_loads, placement, self.keyspace, LAYOUT, self.cluster).exposed_seconds

    def judge(self, profile: Profile) -> dict[str, float]:
        plan, prefix = self.plan(profile), self.setting.prefix
        cost, saved = self.cost(plan), self.home - self.best
        added = {}
        if self.next_loads is not None:
            added[f"{prefix}next_window_added"] = (self.next_cost(plan) - self.next_exact) / self.next_best
        return added | {
            f"{prefix}plan_regret": cost / self.best - 1,
            f"{prefix}plan_capture": (self.home - cost) / saved if saved > 0 else 0.0,
        }


def measure(case: Case) -> Iterator[tuple[str, float]]:
    counts = case.counts()
    largest = max(range(len(counts)), key=lambda table: case.tables[table].rows)
    truth = counts[largest]
    order = np.argsort(-truth, kind="stable")
    order = order[: np.count_nonzero(truth)]
    exact = count_exactly(case)
    following = count_exactly(case.next_window()) if case.following else None
    settings = [Pricing(case, exact, setting, following) for setting in SETTINGS]
    per_step = settings[0].per_step
    yield "dense_bytes", float(dense_bytes(case))
    for pricing in settings:
        prefix = pricing.setting.prefix
        yield f"{prefix}chain_exposed_seconds", pricing.home
        yield f"{prefix}exact_plan_exposed_seconds", pricing.best
        yield f"{prefix}exact_plan_rows", float(pricing.best_rows)
        if following is not None:
            yield f"{prefix}next_window_exact_miss", pricing.next_exact / pricing.next_best - 1
    for divisor in MEMORY_DIVISORS:
        # With exact counters, the fixed extra of a dense table (carries, sample) comes on top.
        sketches = exact if divisor == 1 else _counted(case, dense_bytes(case) // divisor)
        if sketches is None:
            continue
        profile = sketches.profile(per_step)
        label = f"memory_1_{divisor}"
        yield f"{label}_bytes", float(sketches.nbytes)
        for kind in ("dense", "logarithmic", "count_min"):
            yield f"{label}_{kind}_tables", float(sum(choice.kind == kind for choice in sketches.choices()))
        for pricing in settings:
            for name, value in pricing.judge(profile).items():
                yield f"{label}_{name}", value
        name = case.tables[largest].name
        yield from (
            (f"{label}_{key}", value)
            for key, value in _errors(lambda rows, s=sketches, n=name: s.query(n, rows), truth, order).items()  # type: ignore[misc]
        )
        for percent in RECALL_PERCENT:
            yield f"{label}_recall_top_{percent:g}_percent", _recall(profile.tables[largest].hot_rows, truth, percent)
        estimated = float(profile.tables[largest].bin_rows.sum()) + len(profile.tables[largest].hot_rows)
        yield f"{label}_rows_in_curve_ratio", estimated / len(order)


def _counted(case: Case, memory_bytes: int) -> SketchSet | None:
    """Count in sketches of ``memory_bytes``. Return None if the smallest counters need more."""
    try:
        return count(case, memory_bytes)
    except SketchError:
        return None


def _errors(query: Any, truth: Int64Array, order: Int64Array) -> dict[str, float]:
    """Return the mean relative error by percentile of the accessed rows, hottest first."""
    result, first = {}, 0
    for percent in PERCENTILES:
        last = max(1, int(len(order) * percent / 100))
        rows = order[first:last][:: max(1, (last - first) // 100_000)]
        if len(rows):
            error = np.abs(np.asarray(query(rows), dtype=np.float64) / truth[rows] - 1)
            result[f"error_to_{percent:g}_percent"] = float(error.mean())
        first = last
    return result


def _recall(listed: Int64Array, truth: Int64Array, percent: float) -> float:
    """Return the share of the hottest rows among as many rows listed first; ties with the coldest of them count."""
    wanted = max(1, int(np.count_nonzero(truth) * percent / 100))
    least = np.partition(truth, len(truth) - wanted)[len(truth) - wanted]
    return float((truth[listed[:wanted]] >= least).sum()) / wanted


def measure_peers(case: Case, limit: int) -> Iterator[tuple[str, float]]:
    """Measure flexd and DataSketches' count-min and frequent-items at the checked memory, on the first ids only."""
    ids = case.ids()[:limit]
    table = TableSpec("all", case.rows, DIM, DTYPE)
    few = Case("peers", (table,), ((0, ids),))
    truth = few.counts()[0]
    order = np.argsort(-truth, kind="stable")[: np.count_nonzero(truth)]
    memory = max(dense_bytes(few) // CHECKED_DIVISOR, LEAST_COUNT_MIN_BYTES)
    mine, count_min_only = count(few, memory), count(few, memory, logarithmic=False)
    width = max(8, memory // (4 * 8))
    count_min = datasketches.count_min_sketch(4, width)
    log2_entries = max(3, int(math.log2(memory / FREQUENT_ITEMS_ENTRY_BYTES)))
    frequent = datasketches.frequent_items_sketch(log2_entries)
    as_list = ids.tolist()
    for sketch in (count_min, frequent):
        for item in as_list:
            sketch.update(item)
    yield "peers_ids", float(len(ids))
    yield "peers_memory_bytes", float(memory)
    both = {
        "flexd": lambda rows: mine.query("all", rows),
        "flexd_count_min": lambda rows: count_min_only.query("all", rows),
        "datasketches_count_min": lambda rows: np.array([count_min.get_estimate(row) for row in rows.tolist()]),
        "datasketches_frequent_items": lambda rows: np.array([frequent.get_estimate(row) for row in rows.tolist()]),
    }
    for peer, query in both.items():
        for key, value in _errors(query, truth, order).items():
            yield f"peers_{peer}_{key}", value
    found = frequent.get_frequent_items(datasketches.frequent_items_error_type.NO_FALSE_NEGATIVES, 0)
    ranked = np.array([item[0] for item in sorted(found, key=lambda item: -item[1])], dtype=np.int64)
    listed = {
        "flexd": mine.profile().tables[0].hot_rows,
        "flexd_count_min": count_min_only.profile().tables[0].hot_rows,
        "datasketches_frequent_items": ranked,
    }
    for peer, rows in listed.items():
        for percent in RECALL_PERCENT:
            yield f"peers_{peer}_recall_top_{percent:g}_percent", _recall(rows, truth, percent)


def _plan_checks(figures: dict[str, float], case: str, setting: Setting) -> list[dict[str, Any]]:
    """Check the regret, and that a plan of nothing would fail that check: its regret is the saving.

    What the sketch adds in the next window is checked if there is one; a plan of nothing adds the saving.
    """
    prefix, where = setting.prefix, f"{case}, {setting.name}"
    label = f"memory_1_{CHECKED_DIVISOR}_{prefix}"
    regret = figures[f"{label}plan_regret"]
    saving = figures[f"{prefix}chain_exposed_seconds"] / figures[f"{prefix}exact_plan_exposed_seconds"] - 1
    checks = [
        check(
            f"{where}: plan from 1/{CHECKED_DIVISOR} of the dense memory above the plan from exact counts", regret,
            f"<= {LEAST_SAVING:g}", regret <= LEAST_SAVING < saving,
        ),
        check(
            f"{where}: saving of the plan from exact counts against one without replicas", saving,
            f"> {LEAST_SAVING:g}", saving > LEAST_SAVING,
        ),
    ]  # fmt: skip
    if (miss := figures.get(f"{prefix}next_window_exact_miss")) is not None:
        added = figures[f"{label}next_window_added"]
        name = f"{where}: added in the next window to the miss of the plan from exact counts"
        checks.append(check(name, added, f"<= {miss:.6f}", added <= miss < saving))
    return checks


def checks_of(case: str, figures: dict[str, float]) -> list[dict[str, Any]]:
    checks = [entry for setting in SETTINGS for entry in _plan_checks(figures, case, setting)]
    used, allowed = figures[f"memory_1_{CHECKED_DIVISOR}_bytes"], figures["dense_bytes"] / CHECKED_DIVISOR
    checks.append(at_most(f"{case}: memory of the counters", used, allowed))
    if figures["peers_memory_bytes"] > LEAST_COUNT_MIN_BYTES:
        error = "peers_%s_error_to_1_percent"
        mine, peer = figures[error % "flexd_count_min"], figures[error % "datasketches_count_min"]
        name = f"{case}: count-min, error on the top 1 % of rows, beside DataSketches' of equal memory"
        checks.append(at_most(name, mine, peer))
    return checks


def section(options: Namespace) -> Outcome:
    # The peers accept one id a call, so they get the first ids only.
    rows, accesses, peer_ids = (500_000, 4_000_000, 500_000) if options.quick else (10_000_000, 40_000_000, 4_000_000)
    warm_up()
    found: dict[str, dict[str, float]] = {}
    checks: list[dict[str, Any]] = []
    exponents = options.exponents[:1] if options.quick else options.exponents
    for make in [*exponents, *([options.trace] if options.trace else [])]:
        case = trace_case(make) if isinstance(make, Path) else zipf_case(make, rows, accesses)
        found[case.name] = dict([*measure(case), *measure_peers(case, peer_ids)])
        checks += checks_of(case.name, found[case.name])
    return Outcome(found, checks)
