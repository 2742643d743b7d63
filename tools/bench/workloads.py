"""Batches of ``cases.cluster``: the same for every strategy, their bound, and their true profile; and Zipf draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.placement import Placement, RankLayout, Tier
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.sketch.profile import Profile, TableProfile
from flexd.stream.trace import ZipfSampler
from flexd.topology.cluster import Cluster, CollectiveCurve, LinkModel

Int64Array = npt.NDArray[np.int64]


def zipf_batches(rows: int, ids: int, exponent: float, seed: int | list[int] = 0) -> Iterator[Int64Array]:
    """Draw ids of batch after batch: Zipf-popular rows, the popular ones anywhere, in the same places for any seed."""
    places, random = np.random.default_rng(1).permutation(rows), np.random.default_rng(seed)
    sampler = ZipfSampler(rows, exponent)
    while True:
        yield places[sampler.sample(ids, random)]


@dataclass(frozen=True)
class Setting:
    """One job.

    Attributes:
        nodes, local_ranks: ranks are ``nodes * local_ranks``.
        rows, dim: of all tables together, float32.
        tables: the rows are dealt out to them evenly, so that table-wise sharding has one for each rank.
        samples, length: ids of a rank in a step are ``samples * length``.
        zipf: exponent of the popularity of the rows, in random order.
        replica_fraction: replica slots of a rank as a share of all rows.
        batches: of each rank, used round and round.
        seed: of the draws; the popularity of the rows stays the same.
        read_only: that many of the tables, the first ones, are not trained.
    """

    nodes: int = 2
    local_ranks: int = 2
    rows: int = 200_000
    dim: int = 64
    tables: int = 4
    samples: int = 512
    length: int = 50
    zipf: float = 1.05
    replica_fraction: float = 0.05
    batches: int = 24
    seed: int = 0
    read_only: int = 0

    @property
    def layout(self) -> RankLayout:
        return RankLayout(self.nodes, self.local_ranks)

    @property
    def row_bytes(self) -> int:
        return 4 * self.dim

    def embedding_tables(self) -> list[EmbeddingTable]:
        return [
            EmbeddingTable(f"t{t}", self.rows // self.tables, self.dim, trainable=t >= self.read_only)
            for t in range(self.tables)
        ]

    def share(self) -> npt.NDArray[np.float64]:
        """[rows] of all accesses."""
        weight = np.arange(1, self.rows + 1) ** -self.zipf
        return np.random.default_rng(1).permutation(weight / weight.sum())


@dataclass(frozen=True)
class Batch:
    """Ids of one rank and step.

    Attributes:
        values: per table int64 [n], rows of that table, sample by sample.
        lengths: per table int64 [samples].
        order: int64 [samples * length], where each position of the sequences is found in the concatenated values.
    """

    values: tuple[Int64Array, ...]
    lengths: tuple[Int64Array, ...]
    order: Int64Array


def batches_of(setting: Setting, rank: int) -> list[Batch]:
    rng = np.random.default_rng([2, rank, setting.seed] if setting.seed else [2, rank])
    share = setting.share()
    count = setting.samples * setting.length
    return [_batch(setting, rng.choice(setting.rows, count, p=share)) for _ in range(setting.batches)]


def _batch(setting: Setting, drawn: Int64Array) -> Batch:
    """``drawn``: row of table t as ``row * tables + t``."""
    table, row = drawn % setting.tables, drawn // setting.tables
    by_table = np.argsort(table, kind="stable")
    sample = np.arange(len(drawn)) // setting.length
    lengths = np.zeros((setting.tables, setting.samples), np.int64)
    np.add.at(lengths, (table, sample), 1)
    ends = np.cumsum(lengths.sum(axis=1))
    order = np.empty_like(by_table)
    order[by_table] = np.arange(len(drawn))
    return Batch(tuple(np.split(row[by_table], ends[:-1])), tuple(lengths), order)


def keys_of(setting: Setting, batch: Batch) -> Int64Array:
    """In the key space of the collection: the tables one after another."""
    each = setting.rows // setting.tables
    return np.concatenate([table * each + rows for table, rows in enumerate(batch.values)])


def bound_bytes(setting: Setting) -> float:
    """Return the inter-node bytes per step of exact synchronous training with homes ``key % world``, the mean over the
    batches: each node fetches, and pushes a gradient for, each row that it touches and does not home, once per step
    (DESIGN section 6). Rows only: no ids, no headers."""
    layout, steps = setting.layout, setting.batches
    by_rank = [batches_of(setting, rank) for rank in range(layout.world_size)]
    volume = 0
    for step in range(steps):
        for node in range(layout.nodes):
            keys = [keys_of(setting, by_rank[rank][step]) for rank in layout.node_ranks(node)]
            volume += 2 * int((layout.home_node(np.unique(np.concatenate(keys))) != node).sum())
    return setting.row_bytes * volume / steps


INTRA_BYTES_PER_SECOND = 1e9
"""Of the order that processes on one machine exchange."""


def given_cluster(local_ranks: int, rate_mbit: float, *, latencies: bool = True) -> Cluster:
    """Prices for the planner: the rate is given, not probed, and shared by the ranks of a node. Latencies are of the
    order that four processes on two processors show; without them messages count as those of a large job."""

    def link(bytes_per_second: float, latency_seconds: float) -> LinkModel:
        curve = CollectiveCurve(latency_seconds if latencies else 0.0, ((1.0, bytes_per_second),))
        return LinkModel(bytes_per_second, curve, curve, curve)

    inter = rate_mbit * 1e6 / 8 / local_ranks
    return Cluster(
        "emulated", f"given: {rate_mbit} Mbit/s a node", link(INTRA_BYTES_PER_SECOND, 3e-4), link(inter, 1e-3)
    )


def flexshard_tiers(setting: Setting) -> Placement:
    """Return the rows that FlexShard (arXiv 2301.02959) copies, if the link between nodes is the slow one: the hottest,
    one copy in every node, as many as the replica slots hold. It knows neither read-only rows nor rows that several
    ranks of a node ask for; these are exchanged by flexd's two hops, which do."""
    share, layout, each = setting.share(), setting.layout, setting.rows // setting.tables
    # Row r of table t is drawn as r * tables + t.
    keys = (np.arange(setting.rows) % setting.tables) * each + np.arange(setting.rows) // setting.tables
    hottest = keys[np.argsort(-share, kind="stable")]
    # A rank has slots for rows of its place in every other node.
    most = int(setting.replica_fraction * setting.rows) // (layout.nodes - 1)
    rows = np.concatenate([hottest[hottest % layout.world_size == home][:most] for home in range(layout.world_size)])
    return Placement.of(rows, np.full(len(rows), Tier.NODE, np.uint8), 0)


def exact_profile(setting: Setting) -> Profile:
    """Return the profile of a perfect sketch: every row listed with its true share."""
    share, nothing = setting.share(), np.empty(0)
    accesses = float(setting.samples * setting.length * setting.layout.world_size)
    tables = []
    for table in range(setting.tables):
        mine = share[table :: setting.tables]
        exact = mine / mine.sum()
        hot = np.argsort(-exact, kind="stable")
        tables.append(
            TableProfile(
                f"t{table}", len(mine), 1e9, accesses * float(mine.sum()), hot, exact[hot], nothing, nothing,
                float(len(mine)),
            )
        )  # fmt: skip
    return Profile(tuple(tables))
