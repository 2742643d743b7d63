"""Small planning problems for the planner's tests."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flexd.core.keyspace import Homes, KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.planner.model.cost import CostBreakdown, joint_cost
from flexd.planner.model.prices import Exchange
from flexd.planner.model.workload import GroupLoad, RowLoads, TrainingShape
from flexd.planner.plan import PlanOrigin
from flexd.planner.solver.assign import FREE, GroupLimits
from flexd.planner.solver.tiers import JointChoice, choose_jointly
from flexd.sketch.profile import Profile, TableProfile
from flexd.topology.cluster import Cluster, CollectiveCurve, Exposed, LinkModel

LAYOUT = RankLayout(2, 2)
ORIGIN = PlanOrigin("p2", "p1", 4, "test", 123.5)


def flat(bandwidth: float, latency: float = 0.0) -> CollectiveCurve:
    return CollectiveCurve(latency, ((1e6, bandwidth),))


def cluster(
    *,
    all_to_all: float = 10e9,
    all_reduce: float = 20e9,
    intra: float = 100e9,
    latency: float = 0.0,
    exposed: Exposed | None = None,
) -> Cluster:
    """Figures made up for tests, with an all-reduce that reaches more of the wire."""
    return Cluster(
        name="test",
        source="made up",
        intra_node=LinkModel(2 * intra, flat(intra, latency), flat(1.5 * intra, latency), flat(intra, latency)),
        inter_node=LinkModel(25e9, flat(all_to_all, latency), flat(all_reduce, latency), flat(all_to_all, latency)),
        exposed=exposed or Exposed(),
    )


def load(
    accesses: np.ndarray,
    keys: np.ndarray | None = None,
    *,
    row_bytes: int = 64,
    relative_error: float = 0.0,
    bins: tuple[tuple[float, ...], tuple[float, ...]] = ((), ()),
    micro_batches: int = 1,
    trained: np.ndarray | None = None,
    narrow: bool = False,
    layout: RankLayout = LAYOUT,
) -> GroupLoad:
    """The load of rows of ``row_bytes``; ``bins``: (accesses, rows); ``narrow``: they are added wider than they
    travel."""
    keys = np.arange(len(accesses), dtype=np.int64) if keys is None else keys
    order = np.argsort(keys)
    a = np.asarray(accesses, dtype=np.float64)[order]
    dtype, width = ("float16", 2) if narrow else ("float32", 4)
    return GroupLoad(
        0, TableSpec("t", 10**9, row_bytes // width, dtype), TrainingShape(micro_batches=micro_batches), layout,
        keys[order], RowLoads(a, trained), np.stack([a * (1 - relative_error), a * (1 + relative_error)]),
        RowLoads(np.array(bins[0])), np.array(bins[1]),
    )  # fmt: skip


def zipf(rows: int, exponent: float, accesses: float) -> np.ndarray:
    p = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    return accesses * p / p.sum()


def profile(
    keyspace: KeySpace, accesses_per_step: float, *, hot: int, exponent: float = 1.2, seed: int = 0, shift: int = 0
) -> Profile:
    """Each table Zipf over a random order of its rows, ``hot`` rows listed; ``shift`` moves the popularity (drift)."""
    tables = []
    for i, spec in enumerate(keyspace.tables):
        order = np.roll(np.random.default_rng(seed + i).permutation(spec.rows), shift)
        share = zipf(spec.rows, exponent, 1.0)
        tail = share[hot:]
        tables.append(
            TableProfile(
                table=spec.name,
                rows=spec.rows,
                weight=1e6,
                accesses_per_step=accesses_per_step,
                hot_rows=order[:hot].astype(np.int64),
                hot_share=share[:hot],
                bin_share=np.array([tail.mean()]) if len(tail) else np.empty(0),
                bin_rows=np.array([float(len(tail))]) if len(tail) else np.empty(0),
                distinct_rows=float(spec.rows),
            )
        )
    return Profile(tables=tuple(tables), generation=3, samples=10**6)


def group_cost(
    load: GroupLoad,
    tiers: np.ndarray,
    layout: RankLayout,
    cluster: Cluster,
    exchange: Exchange = Exchange.CHAIN,
    unlisted: np.ndarray | None = None,
) -> CostBreakdown:
    """Return the cost of one dim-group alone."""
    return joint_cost(
        [replace(load, layout=layout)], [tiers], cluster, exchange, None if unlisted is None else [unlisted]
    )


def choose_tiers(
    load: GroupLoad,
    layout: RankLayout,
    cluster: Cluster,
    slots: int | np.ndarray | GroupLimits,
    live: np.ndarray,
    horizon: float,
) -> JointChoice:
    """Return the best tiers of one dim-group alone, with its ``tiers`` and ``gains`` themselves."""
    limits = slots
    if not isinstance(slots, GroupLimits):
        limits = GroupLimits(np.full(layout.world_size, slots, np.int64), np.full(len(load.keys), FREE, np.uint8))
    joint = choose_jointly([replace(load, layout=layout)], cluster, [limits], [live], horizon)
    return replace(joint, tiers=joint.tiers[0], gains=joint.gains[0])


def bytes_of_bags(
    keyspace: KeySpace,
    layout: RankLayout,
    bags: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]],
    exchange: Exchange,
) -> np.ndarray:
    """Return int64[ranks, 3, 2] bytes of ids, sums and gradients of one pass by link, without the sizes exchange.

    Args:
        bags: by rank the (int64[n] keys, lengths that sum to n) of each feature.
    """
    homes, local, world = Homes(keyspace, layout), layout.local_ranks, layout.world_size
    specs = [keyspace.tables[group.tables[0]] for group in keyspace.groups]
    features = [(rank, *feature) for rank, of_rank in enumerate(bags) for feature in of_rank]
    key = np.concatenate([np.empty(0, np.int64), *(keys for _, keys, _ in features)])
    source = np.repeat([rank for rank, _, _ in features], [len(keys) for _, keys, _ in features]).astype(np.int64)
    lengths = np.concatenate([np.empty(0, np.int64), *(each for _, _, each in features)])
    bag = np.repeat(np.arange(len(lengths)), lengths)
    vector = np.array([spec.row_bytes for spec in specs])[keyspace.group_of(key)]
    home = homes.home_rank(key)
    over_rail = home // local * local + source % local
    sent = np.zeros((world, 3, 2), dtype=np.int64)
    for target in (over_rail, home) if exchange is Exchange.CHAIN else (home,):
        # One vector comes back from each rank that has ids of the bag.
        first = np.zeros(len(key), dtype=np.bool_)
        first[np.unique(bag * world + target, return_index=True)[1]] = True
        away, far = source != target, (source // local != target // local).astype(np.int64)
        np.add.at(sent, (source[away], 0, far[away]), 4)
        once = away & first
        np.add.at(sent, (target[once], 1, far[once]), vector[once])
        np.add.at(sent, (source[once], 2, far[once]), vector[once])
        source = target
    return sent
