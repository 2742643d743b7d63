"""All-reduce or sums by way of the home for float32 gradients of replicated rows, priced by the cost model.

    python tools/bench_replica_sync.py [--json]

For each link between nodes, layout, skew, size of a step and number of micro-batches (merged in the backward pass), one
plan is made with each of the two ways (the chain of two hops, everything exposed, touches by independence). Printed:
milliseconds of communication a step with all rows at HOME and with each plan, and what a choice by price saves over
today's rule (float32 wires are all-reduced) with its share of that communication. Everything is arithmetic of the cost
model, no measurement. Links: the presets, and assumed ones on which both collectives have the bandwidth of the wire; a
collective takes as many latencies of a message as a ring all-reduce, 2 (N-1), and a pairwise all-to-all, N-1, have
rounds. The check fails if no plan copies a row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from bench_report import check, ending

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.planner.model.cost import LoadSums
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.model.workload import make_loads
from flexd.planner.solver.limits import PlanLimits, slots_of_ranks
from flexd.planner.solver.tiers import JointChoice, choose_jointly
from flexd.sketch.profile import Profile
from flexd.sketch.zipf_profile import zipf_table
from flexd.topology.cluster import Cluster, CollectiveCurve
from flexd.topology.files import load_preset

ROWS = 10_000_000
LISTED = 50_000
DIM = 128
REPLICA_SHARE = 0.01
LAYOUTS = (RankLayout(2, 8), RankLayout(12, 8))
MICRO_BATCHES = (1, 4)
SKEWS = (1.05, 1.2)
LOOKUPS = (1_000, 100_000)
"""Of a rank in a step."""
ASSUMED_LINKS = {
    "200 Mbit/s, 0.1 ms": (25e6, 1e-4),
    "10 Gbit/s, 50 us": (1.25e9, 5e-5),
    "10 Gbit/s, 1 ms": (1.25e9, 1e-3),
}
"""Bytes a second, seconds of a message."""


@dataclass(frozen=True)
class WayPrices:
    """Seconds of communication a step, mean over the ranks.

    Attributes:
        home: all rows at HOME.
        all_reduced, by_home: with the best plan for this way.
        copied: rows above HOME, of the plan for either way.
    """

    home: float
    all_reduced: float
    by_home: float
    copied: tuple[int, int]

    @property
    def won(self) -> float:
        """Seconds that the choice by price saves over the all-reduce."""
        return self.all_reduced - min(self.all_reduced, self.by_home)


def assumed(nodes: int, bandwidth: float, message_seconds: float) -> Cluster:
    """Return a cluster whose collectives differ between nodes by their rounds alone."""
    base = load_preset("azure-a100-200g")
    once = CollectiveCurve((nodes - 1) * message_seconds, ((1e9, bandwidth),))
    twice = replace(once, latency_seconds=2 * once.latency_seconds)
    return replace(base, inter_node=replace(base.inter_node, all_to_all=once, all_reduce=twice, all_gather=once))


def way_prices(
    cluster: Cluster, layout: RankLayout, skew: float, lookups: int, passes: int, rows: int = ROWS
) -> WayPrices:
    """Plan one float32 table once for each way."""
    keyspace = KeySpace([TableSpec("table", ROWS, DIM, "float32", "rowwise_adagrad")])
    table = zipf_table("table", ROWS, skew, LISTED, float(lookups * layout.world_size), 0)
    shape = TrainingShape(micro_batches=passes, merged_backward=passes > 1)
    (load,) = make_loads(Profile((table,), generation=1, samples=10**9), keyspace, layout, shape)
    slots = slots_of_ranks(int(REPLICA_SHARE * ROWS), layout)
    limits = PlanLimits().of_group(load, keyspace, slots)
    live = np.zeros(len(load.keys), np.uint8)

    def plan(*, by_home: bool) -> JointChoice:
        # To the prices, the dtype of the wire is nothing but the rule that chooses the way.
        sums = [LoadSums(replace(load, sums_at_home=by_home), layout)]
        return choose_jointly(sums, cluster, [limits], [live], 1e6)

    all_reduced, by_home = plan(by_home=False), plan(by_home=True)
    copied = (int(np.count_nonzero(all_reduced.tiers[0])), int(np.count_nonzero(by_home.tiers[0])))
    home, reduced, at_home = (c.exposed_seconds for c in (all_reduced.home, all_reduced.cost, by_home.cost))
    return WayPrices(home, reduced, at_home, copied)


def cases() -> Iterator[tuple[str, WayPrices]]:
    for layout in LAYOUTS:
        links = {preset: load_preset(preset) for preset in ("azure-a100-200g", "h100-400g")}
        links |= {name: assumed(layout.nodes, *figures) for name, figures in ASSUMED_LINKS.items()}
        for (link, cluster), skew, lookups, passes in product(links.items(), SKEWS, LOOKUPS, MICRO_BATCHES):
            name = f"{link}, {layout.nodes}x{layout.local_ranks}, Zipf {skew}, {lookups} look-ups, K {passes}"
            yield name, way_prices(cluster, layout, skew, lookups, passes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print figures and checks in the last line")
    arguments = parser.parse_args()
    print(f"{'milliseconds a step':56} {'HOME':>9} {'all-red.':>9} {'by home':>9} {'won':>8} {'share':>7}  rows copied")
    figures, copied = {}, 0
    for name, found in cases():
        shown = (found.home, found.all_reduced, found.by_home, found.won)
        numbers = " ".join(f"{seconds * 1e3:9.4f}" for seconds in shown)
        print(f"{name:56} {numbers} {found.won / found.all_reduced:7.2%}  {found.copied[0]} {found.copied[1]}")
        figures[name] = dict(zip(("home", "all_reduced", "by_home", "won"), shown, strict=True))
        copied += max(found.copied)
    return ending(figures, [check("rows copied by any plan", copied, "above 0", copied > 0)], as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
