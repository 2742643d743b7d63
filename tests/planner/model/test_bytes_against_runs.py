"""The bytes the cost model predicts are the bytes that real ranks send, to 2 %."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import Delta, Placement, RankLayout, Tier
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.features import Jagged
from flexd.planner.model.cost import CostBreakdown
from flexd.planner.model.prices import Exchange
from flexd.planner.model.workload import make_loads
from flexd.planner.plan import placement_cost
from flexd.sketch.profile import Profile, TableProfile
from flexd.topology.cluster import INTER, INTRA
from flexd.topology.files import load_preset
from tests.support.rank_pool import Ranks

TABLES = {"item": (3000, 32, 2000), "shop": (500, 8, 600)}
"""(rows, dim, accesses of a rank in a step) by table."""


def keyspace() -> KeySpace:
    return KeySpace([TableSpec(name, rows, dim) for name, (rows, dim, _) in TABLES.items()])


def share_of(name: str) -> np.ndarray:
    """Return the float64 [rows] probability of each row, with popular rows anywhere in the table."""
    rows = TABLES[name][0]
    share = np.arange(1, rows + 1) ** -1.1
    return np.random.default_rng(len(name) + rows).permutation(share / share.sum())


def exact_profile(layout: RankLayout) -> Profile:
    """Return a profile that lists every row with its true share."""
    nothing = np.empty(0)
    return Profile(
        tuple(
            TableProfile(
                table=name,
                rows=rows,
                weight=1e6,
                accesses_per_step=float(accesses * layout.world_size),
                hot_rows=np.arange(rows),
                hot_share=share_of(name),
                bin_share=nothing,
                bin_rows=nothing,
                distinct_rows=float(rows),
            )
            for name, (rows, _, accesses) in TABLES.items()
        )
    )


def placement(device: int, node: int) -> Placement:
    """Return a placement of the most popular rows of each table at DEVICE and of the next at NODE."""
    keys, tiers, space = [], [], keyspace()
    for table, name in enumerate(TABLES):
        hot = np.argsort(-share_of(name), kind="stable")[: device + node]
        keys.append(space.keys(table, hot))
        tiers.append(np.repeat(np.array([Tier.DEVICE, Tier.NODE], np.uint8), [device, node]))
    return Placement.of(np.concatenate(keys), np.concatenate(tiers), 0)


def bytes_per_step(
    rank: int, layout: RankLayout, exchange: str, device: int, node: int, steps: int
) -> dict[str, float]:
    """Return the bytes that this rank sends in a step, by kind and link: the mean over ``steps`` with the placement."""
    collection = EmbeddingCollection(
        [EmbeddingTable(name, rows, dim) for name, (rows, dim, _) in TABLES.items()],
        layout=layout, exchange=exchange, replica_slots=[group.rows for group in keyspace().groups],
    )  # fmt: skip
    target = placement(device, node)
    if len(target):
        collection.engine.inbox.offer(1, Delta(target.keys, np.zeros(len(target), np.uint8), target.tiers))
    rng = np.random.default_rng([7, rank])
    before: dict[str, int] = {}
    for step in range(steps + 2):
        if step == 2:
            assert collection.placement_version == (1 if len(target) else 0)
            before = collection.traffic.totals()
        features = {
            name: Jagged(torch.from_numpy(rng.choice(rows, accesses, p=share_of(name))), torch.tensor([accesses]))
            for name, (rows, _, accesses) in TABLES.items()
        }
        torch.stack([jagged.values.sum() for jagged in collection(features).values()]).sum().backward()
        collection.optimizer.step()
    return {name: (value - before[name]) / steps for name, value in collection.traffic.totals().items()}


CLUSTER = load_preset("azure-a100-200g")
PLACEMENTS = {"home": (0, 0), "node": (0, 400), "device": (200, 0), "mixed": (100, 300)}
LAYOUTS = [RankLayout(2, 2), RankLayout(1, 2), RankLayout(2, 1), RankLayout(3, 2)]
STEPS = 6
TOLERANCE = 0.02


def counted(ranks: Ranks, layout: RankLayout, exchange: str, device: int, node: int) -> dict[str, float]:
    """Mean over the ranks."""
    found = ranks(layout.world_size).run(bytes_per_step, layout, exchange, device, node, STEPS)
    return {name: sum(rank[name] for rank in found) / len(found) for name in found[0]}


def check(cost: CostBreakdown, sent: dict[str, float]) -> None:
    for link, name in ((INTRA, "intra"), (INTER, "inter")):
        assert cost.all_to_all_bytes(link) == pytest.approx(sent[f"all_to_all_{name}_bytes"], rel=TOLERANCE, abs=100)
        assert cost.sync_bytes(link) == pytest.approx(sent[f"sync_{name}_bytes"], rel=TOLERANCE, abs=100)


@pytest.mark.parametrize(
    ("layout", "tiers"),
    [*((LAYOUTS[0], tiers) for tiers in PLACEMENTS), *((layout, "mixed") for layout in LAYOUTS[1:])],
    ids=str,
)
def test_the_chain_sends_what_is_predicted(ranks: Ranks, layout: RankLayout, tiers: str) -> None:
    device, node = PLACEMENTS[tiers]
    loads = make_loads(exact_profile(layout), keyspace(), layout)
    cost = placement_cost(loads, placement(device, node), keyspace(), CLUSTER)
    sent = counted(ranks, layout, "chain", device, node)
    check(cost, sent)
    assert sum(sent[f"{kind}_{link}_bytes"] for kind in ("all_to_all", "sync") for link in ("intra", "inter")) > 1e4


@pytest.mark.parametrize("layout", [RankLayout(2, 2), RankLayout(3, 2)], ids=["2x2", "3x2"])
def test_the_direct_exchange_sends_what_is_predicted(ranks: Ranks, layout: RankLayout) -> None:
    loads = make_loads(exact_profile(layout), keyspace(), layout)
    cost = placement_cost(loads, placement(0, 0), keyspace(), CLUSTER, Exchange.DIRECT_DEDUP)
    check(cost, counted(ranks, layout, "direct", 0, 0))
