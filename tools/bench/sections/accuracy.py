"""Accuracy of the counters by memory: the cost of a plan made from them.

The same accesses are counted exactly and in sketches of 1 to 1/50 of the exact counters' memory (4 bytes a row of all
tables of the job together); the memory in use is printed with every figure. A plan is made from each and priced under
the exact counts: the regret is its cost above the plan from the exact counts, in exposed seconds of a step; the capture
is its share of the saving of that plan against the chain without replicas. The cluster is a scale model
(``flexd.topology.files``): latencies are those of a step as many times smaller as the table is smaller than the
design's example. A step has four micro-batches, on a link of a tenth of the preset's bandwidth and 200 us: where a plan
has something to save. A trace is one job of all its tables (docs/demo.md).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import SketchError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import Placement, RankLayout
from flexd.planner.model.workload import TrainingShape, make_loads
from flexd.planner.plan import PlanOrigin, make_plan, placement_cost
from flexd.sketch.profile import Profile
from flexd.sketch.sketch_set import SketchSet, warm_up
from flexd.sketch.table_sketch import SketchSettings
from flexd.stream.trace import ZipfSampler, load_trace
from flexd.topology.cluster import Cluster, Collective, CollectiveCurve, LinkModel
from flexd.topology.files import load_preset, scale_model
from tools.bench.harness import Outcome, at_most, check

Int64Array = npt.NDArray[np.int64]

EXPONENTS = (1.05, 0.9, 1.2)
MEMORY_DIVISORS = (1, 2, 5, 10, 20, 50)
CHECKED_DIVISOR = 10
MESSAGE_IDS = 65_536
LAYOUT = RankLayout(12, 8)
DIM, DTYPE = 128, "float16"
EXAMPLE_ROWS = 80e6
ACCESSES_PER_ROW_AND_RANK = 15.5e6 / EXAMPLE_ROWS
"""Accesses of a training step in the design's example."""
REPLICA_SHARE = 0.01
SLOW_LINK_SECONDS, SLOW_LINK_DIVISOR = 200e-6, 10
MICRO_BATCHES = 4
LEAST_SAVING = 0.01
"""Share of the step below which a plan of nothing passes the check of the regret."""


def slow_between_nodes(cluster: Cluster) -> Cluster:
    """Return the cluster with a slow link of high latency between its nodes."""
    full = cluster.inter_node
    curves = [
        CollectiveCurve(
            SLOW_LINK_SECONDS,
            tuple((size, bandwidth / SLOW_LINK_DIVISOR) for size, bandwidth in full.curve(collective).points),
        )
        for collective in (Collective.ALL_TO_ALL, Collective.ALL_REDUCE, Collective.ALL_GATHER)
    ]
    slow = LinkModel(full.wire_bytes_per_second / SLOW_LINK_DIVISOR, *curves)
    return replace(cluster, name=f"{cluster.name}-slow-link", inter_node=slow)


@dataclass(frozen=True)
class Case:
    """Accesses of a job in order: (table index, int64[n] rows)."""

    name: str
    tables: tuple[TableSpec, ...]
    accesses: tuple[tuple[int, Int64Array], ...]

    @property
    def rows(self) -> int:
        return sum(table.rows for table in self.tables)

    @property
    def dense_bytes(self) -> int:
        """Return the memory of exact counters of all tables: 4 bytes per row."""
        return 4 * self.rows

    def count(self, memory_bytes: int, **settings: Any) -> SketchSet:
        sketches = SketchSet(self.tables, SketchSettings(memory_bytes, None, **settings))
        for table, rows in self.accesses:
            for start in range(0, len(rows), MESSAGE_IDS):
                sketches.ingest(self.tables[table].name, rows[start : start + MESSAGE_IDS], 0, 1.0)
        return sketches

    def count_exactly(self) -> SketchSet:
        """Count exactly, and list every row in the profile: a plan is priced by the rows that the profile lists, so a
        row beyond the list, which another sketch may well list among equals, would be priced as if it had no copies."""
        return self.count(16 * self.dense_bytes + 2**26 * len(self.tables), max_hot_rows=self.rows)


def zipf_case(exponent: float, rows: int, accesses: int) -> Case:
    random = np.random.default_rng(0)
    ranks = ZipfSampler(rows, exponent).sample(accesses, random)
    return Case(f"zipf_{exponent:g}", (TableSpec("t", rows, DIM, DTYPE),), ((0, random.permutation(rows)[ranks]),))


def trace_case(path: Path) -> Case:
    """Read all tables of a trace."""
    trace = load_trace(path)
    tables = tuple(
        TableSpec(name, int(rows), DIM, DTYPE) for name, rows in zip(trace.table_names, trace.table_rows, strict=True)
    )
    rows = trace.row.astype(np.int64)
    return Case("trace", tables, tuple((at, rows[trace.table == at]) for at in np.unique(trace.table).tolist()))


class Pricing:
    """Prices plans made from any profile under the exact counts."""

    def __init__(self, case: Case, exact: SketchSet) -> None:
        self.keyspace = KeySpace(case.tables)
        preset = slow_between_nodes(load_preset("azure-a100-200g"))
        self.cluster = scale_model(preset, max(1.0, EXAMPLE_ROWS / case.rows))
        self.per_step = ACCESSES_PER_ROW_AND_RANK * case.rows * LAYOUT.world_size
        self.slots = [max(1, int(REPLICA_SHARE * group.rows)) for group in self.keyspace.groups]
        self.shape = TrainingShape(micro_batches=MICRO_BATCHES)
        profile = exact.profile(self.per_step)
        self.loads = make_loads(profile, self.keyspace, LAYOUT, self.shape)
        self.home, best = self.cost(Placement.empty()), self.plan(profile)
        self.best, self.best_rows = self.cost(best), len(best)

    def plan(self, profile: Profile) -> Placement:
        return make_plan(
            profile, self.keyspace, LAYOUT, self.cluster, self.slots, Placement.empty(),
            PlanOrigin("bench", "", 1, "bench", 0.0), horizon_steps=1e9, shape=self.shape,
        ).target  # fmt: skip

    def cost(self, placement: Placement) -> float:
        return placement_cost(self.loads, placement, self.keyspace, self.cluster).exposed_seconds

    def judge(self, profile: Profile) -> dict[str, float]:
        cost, saved = self.cost(self.plan(profile)), self.home - self.best
        return {"plan_regret": cost / self.best - 1, "plan_capture": (self.home - cost) / saved if saved > 0 else 0.0}


def measure(case: Case) -> dict[str, Any]:
    exact = case.count_exactly()
    pricing = Pricing(case, exact)
    found: dict[str, Any] = {
        "dense_bytes": float(case.dense_bytes), "chain_exposed_seconds": pricing.home,
        "exact_plan_exposed_seconds": pricing.best, "exact_plan_rows": float(pricing.best_rows),
    }  # fmt: skip
    for divisor in MEMORY_DIVISORS:
        try:
            # With exact counters, the fixed extra of a dense table (carries, sample) comes on top.
            sketches = exact if divisor == 1 else case.count(case.dense_bytes // divisor)
        except SketchError:  # the smallest counters need more
            continue
        kinds = [choice.kind for choice in sketches.choices()]
        found[f"memory_1_{divisor}"] = {
            "bytes": float(sum(choice.bytes for choice in sketches.choices())),
            **{f"{kind}_tables": float(kinds.count(kind)) for kind in set(kinds)},
            **pricing.judge(sketches.profile(pricing.per_step)),
        }  # fmt: skip
    return found


def checks_of(case: str, figures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Check the regret, and that a plan of nothing would fail that check: its regret is the saving."""
    checked = figures[f"memory_1_{CHECKED_DIVISOR}"]
    regret = checked["plan_regret"]
    saving = figures["chain_exposed_seconds"] / figures["exact_plan_exposed_seconds"] - 1
    yield check(
        f"{case}: plan from 1/{CHECKED_DIVISOR} of the dense memory above the plan from exact counts",
        regret, f"<= {LEAST_SAVING:g}", regret <= LEAST_SAVING < saving,
    )  # fmt: skip
    yield check(
        f"{case}: saving of the plan from exact counts against one without replicas", saving,
        f"> {LEAST_SAVING:g}", saving > LEAST_SAVING,
    )  # fmt: skip
    yield at_most(f"{case}: memory of the counters", checked["bytes"], figures["dense_bytes"] / CHECKED_DIVISOR)


def section(options: Namespace) -> Outcome:
    rows, accesses = (2_000_000, 8_000_000) if options.quick else (10_000_000, 40_000_000)
    warm_up()
    figures: dict[str, dict[str, Any]] = {}
    checks: list[dict[str, Any]] = []
    cases = [zipf_case(exponent, rows, accesses) for exponent in EXPONENTS[: 1 if options.quick else None]]
    for case in [*cases, *([trace_case(options.trace)] if options.trace else [])]:
        figures[case.name] = measure(case)
        checks += checks_of(case.name, figures[case.name])
    return Outcome(figures, checks)
