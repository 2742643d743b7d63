#!/usr/bin/env python3
"""One rank of tools/bench_model.py: probes the links, predicts a step on them, trains, and compares.

Started with the environment that torchrun gives. Rank 0 writes the comparison as JSON to the path in the first
argument; the second is the settings as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Delta, Placement
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.exchange.process_groups import layout_from_environment
from flexd.embedding.jagged import Jagged
from flexd.planner.model.cost import CostBreakdown
from flexd.planner.model.row_bytes import Exchange, Phase, TrafficLink
from flexd.planner.model.workload import make_loads
from flexd.planner.plan import make_plan, placement_cost
from flexd.sketch.profile import Profile, TableProfile
from flexd.topology.cluster import Cluster
from flexd.topology.files import load_cluster, write_cluster
from flexd.topology.probe import ProbeOptions, probe
from flexd.topology.timing import ProbeGroups

TIMEOUT = timedelta(seconds=120)
ROWS, DIM = 40_000, 64


@dataclass(frozen=True)
class Settings:
    """``probe_seconds`` for all curves; ``accesses`` of a rank in a step; ``steps`` measured of each strategy."""

    probe_seconds: float
    probe_bytes: int
    accesses: int
    zipf: float
    steps: int


@dataclass(frozen=True)
class Strategy:
    name: str
    exchange: str
    priced: Exchange
    placement: Placement


def share(settings: Settings) -> np.ndarray:
    """float64 [rows]: Zipf over a random order of the rows."""
    weight = np.arange(1, ROWS + 1) ** -settings.zipf
    return np.random.default_rng(1).permutation(weight / weight.sum())


def exact_profile(settings: Settings, layout: RankLayout) -> Profile:
    """Return the profile of a perfect sketch: every row listed with its true share."""
    exact, nothing = share(settings), np.empty(0)
    per_step = float(settings.accesses * layout.world_size)
    table = TableProfile(
        "item", ROWS, 1e9, per_step, np.arange(ROWS), exact, exact, exact, nothing, nothing, float(ROWS), 1.0
    )
    return Profile((table,))


def strategies(settings: Settings, layout: RankLayout, cluster: Cluster, keyspace: KeySpace) -> list[Strategy]:
    hot = np.argsort(-share(settings), kind="stable")

    def replicated(rows: int, tier: Tier) -> Placement:
        return Placement.of(hot[:rows].astype(np.int64), np.full(rows, tier, np.uint8), 0)

    plan = make_plan(
        exact_profile(settings, layout), keyspace, layout, cluster, [ROWS // 10], Placement.empty(), plan_id="bench",
        parent_id="", topology_generation=1, horizon_steps=1e9, now_unix_seconds=0.0, reason="bench",
    )  # fmt: skip
    empty = Placement.empty()
    return [
        Strategy("direct, no dedup", "direct_no_dedup", Exchange.DIRECT, empty),
        Strategy("direct, dedup", "direct", Exchange.DIRECT_DEDUP, empty),
        Strategy("chain, all HOME", "chain", Exchange.CHAIN, empty),
        Strategy("chain, 2000 rows NODE", "chain", Exchange.CHAIN, replicated(2000, Tier.NODE)),
        Strategy("chain, 500 rows DEVICE", "chain", Exchange.CHAIN, replicated(500, Tier.DEVICE)),
        Strategy("chain, the plan", "chain", Exchange.CHAIN, plan.target),
    ]


def predict(strategy: Strategy, settings: Settings, layout: RankLayout, cluster: Cluster) -> CostBreakdown:
    keyspace = KeySpace([TableSpec("item", ROWS, DIM)])
    loads = make_loads(exact_profile(settings, layout), keyspace, layout)
    return placement_cost(loads, strategy.placement, keyspace, layout, cluster, strategy.priced)


class CollectiveClock:
    """Seconds of each of the collection's collectives. All ranks start each together, so that no rank's computing
    counts as another's communication; each takes as long as on its slowest rank."""

    def __init__(self, collection: EmbeddingCollection) -> None:
        self._seconds: list[float] = []
        for peers in (collection.engine.groups.node, collection.engine.groups.rail, collection.engine.groups.world):
            if peers.size > 1:
                for name in ("all_to_all", "all_reduce", "all_gather"):
                    setattr(peers, name, self._timed(getattr(peers, name)))

    def _timed(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            dist.barrier()
            started = time.perf_counter()
            result = collective(*args, **named)
            self._seconds.append(time.perf_counter() - started)
            return result

        return run

    def drain(self) -> float:
        """Collective: return the seconds since the last call."""
        slowest = torch.tensor(self._seconds, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self._seconds = []
        return float(slowest.sum())


def train(strategy: Strategy, settings: Settings, layout: RankLayout) -> dict[str, Any]:
    """Seconds and bytes of a step: this rank's."""
    collection = EmbeddingCollection(
        [EmbeddingTable("item", ROWS, DIM)], layout=layout, exchange=strategy.exchange, replica_slots=[ROWS],
        max_migration_bytes_per_step=2**30,
    )  # fmt: skip
    assert all(isinstance(peers, Peers) for peers in (collection.engine.groups.node, collection.engine.groups.rail))
    if len(strategy.placement):
        home = np.zeros(len(strategy.placement), np.uint8)
        collection.engine.inbox.offer(1, Delta(strategy.placement.keys, home, strategy.placement.tiers))
    rng = np.random.default_rng([2, dist.get_rank()])
    exact = share(settings)
    clock = CollectiveClock(collection)
    seconds, before = [], {}
    for step in range(settings.steps + 2):
        ids = torch.from_numpy(rng.choice(ROWS, settings.accesses, p=exact))
        if step == 2:
            before = collection.traffic.totals()
        collection({"item": Jagged(ids, torch.tensor([len(ids)]))})["item"].values.sum().backward()
        collection.optimizer.step()
        seconds.append(clock.drain())
    if collection.placement_version != (1 if len(strategy.placement) else 0):
        raise RuntimeError(f"{strategy.name}: the placement was not applied")
    sent = {name: (value - before[name]) / settings.steps for name, value in collection.traffic.totals().items()}
    quartiles = np.percentile(seconds[2:], (25, 50, 75))
    return {"seconds": float(quartiles[1]), "spread": float(quartiles[2] - quartiles[0]), "sent": sent}


def compare(strategy: Strategy, settings: Settings, layout: RankLayout, cluster: Cluster) -> dict[str, Any]:
    """Collective: prediction beside the mean over the ranks."""
    cost = predict(strategy, settings, layout, cluster)
    mine = train(strategy, settings, layout)
    totals = torch.tensor([mine["seconds"], mine["spread"], *mine["sent"].values()], dtype=torch.float64)
    dist.all_reduce(totals)
    seconds, spread, *sent = (totals / layout.world_size).tolist()
    by_name = dict(zip(mine["sent"], sent, strict=True))
    counted = sum(by_name[f"{kind}_inter_bytes"] for kind in ("all_to_all", "sync"))
    predicted = cost.all_to_all_bytes(TrafficLink.INTER_NODE) + cost.sync_bytes(TrafficLink.INTER_NODE)
    return {
        "strategy": strategy.name,
        "replicated_rows": len(strategy.placement),
        "predicted_seconds": cost.peak_exposed_seconds,  # every collective as long as on its busiest rank: as timed
        "predicted_mean_seconds": cost.exposed_seconds,
        "measured_seconds": seconds,
        "measured_quartile_distance_seconds": spread,
        "error": cost.peak_exposed_seconds / seconds - 1,
        "predicted_inter_node_bytes": predicted,
        "counted_inter_node_bytes": counted,
        "bytes_error": predicted / counted - 1,
        "predicted_phases": {phase.name.lower(): float(cost.phase_seconds[phase].sum()) for phase in Phase},
    }


def main() -> int:
    out, settings = Path(sys.argv[1]), Settings(**json.loads(sys.argv[2]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    layout = layout_from_environment()
    groups = ProbeGroups.create(layout, "cpu", TIMEOUT)
    report = probe(groups, ProbeOptions(max_bytes=settings.probe_bytes, budget_seconds=settings.probe_seconds))
    groups.close()
    topology = out.with_suffix(f".{dist.get_rank()}.yaml")
    write_cluster(report.cluster(), topology)  # the prediction goes through the file, as the daemon's would
    cluster = load_cluster(topology)
    keyspace = KeySpace([TableSpec("item", ROWS, DIM)])
    rows = [compare(one, settings, layout, cluster) for one in strategies(settings, layout, cluster, keyspace)]
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"source": cluster.source, "topology": topology.read_text(), "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
