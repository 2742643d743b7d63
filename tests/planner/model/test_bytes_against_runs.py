"""The bytes the cost model predicts are the bytes that real ranks send, to 2 %."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flexd.core.layout import RankLayout
from flexd.planner.model.cost import CostBreakdown
from flexd.planner.model.row_bytes import Exchange, TrafficLink
from flexd.planner.model.workload import make_loads
from flexd.planner.plan import placement_cost
from flexd.topology.files import load_preset
from tests.support import model_jobs
from tests.support.model_jobs import exact_profile, keyspace, placement
from tests.support.rank_pool import RankPool

CLUSTER = load_preset("azure-a100-200g")
PLACEMENTS = {"home": (0, 0), "node": (0, 400), "device": (200, 0), "mixed": (100, 300)}
LAYOUTS = [RankLayout(2, 2), RankLayout(1, 2), RankLayout(2, 1), RankLayout(3, 2)]
STEPS = 6
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    made: dict[int, RankPool] = {}
    yield made
    for pool in made.values():
        pool.close()


def counted(pools: dict[int, RankPool], layout: RankLayout, exchange: str, device: int, node: int) -> dict[str, float]:
    """Mean over the ranks."""
    pool = pools.get(layout.world_size) or pools.setdefault(layout.world_size, RankPool(layout.world_size))
    ranks = pool.run(model_jobs.bytes_per_step, layout, exchange, device, node, STEPS)
    return {name: sum(rank[name] for rank in ranks) / len(ranks) for name in ranks[0]}


def check(cost: CostBreakdown, sent: dict[str, float]) -> None:
    for link, name in ((TrafficLink.INTRA_NODE, "intra"), (TrafficLink.INTER_NODE, "inter")):
        assert cost.all_to_all_bytes(link) == pytest.approx(sent[f"all_to_all_{name}_bytes"], rel=TOLERANCE, abs=100)
        assert cost.sync_bytes(link) == pytest.approx(sent[f"sync_{name}_bytes"], rel=TOLERANCE, abs=100)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.nodes}x{layout.local_ranks}")
@pytest.mark.parametrize("tiers", PLACEMENTS)
def test_the_chain_sends_what_is_predicted(pools: dict[int, RankPool], layout: RankLayout, tiers: str) -> None:
    device, node = PLACEMENTS[tiers]
    loads = make_loads(exact_profile(layout), keyspace(), layout)
    cost = placement_cost(loads, placement(device, node), keyspace(), layout, CLUSTER)
    sent = counted(pools, layout, "chain", device, node)
    check(cost, sent)
    assert sum(sent[f"{kind}_{link}_bytes"] for kind in ("all_to_all", "sync") for link in ("intra", "inter")) > 1e4


@pytest.mark.parametrize("layout", [RankLayout(2, 2), RankLayout(3, 2)], ids=["2x2", "3x2"])
@pytest.mark.parametrize(
    ("exchange", "priced"), [("direct", Exchange.DIRECT_DEDUP), ("direct_no_dedup", Exchange.DIRECT)]
)
def test_the_direct_exchange_sends_what_is_predicted(
    pools: dict[int, RankPool], layout: RankLayout, exchange: str, priced: Exchange
) -> None:
    loads = make_loads(exact_profile(layout), keyspace(), layout)
    cost = placement_cost(loads, placement(0, 0), keyspace(), layout, CLUSTER, priced)
    check(cost, counted(pools, layout, exchange, 0, 0))
