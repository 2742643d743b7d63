"""Bytes of a pooled table that answers by rows, and of the same table if it answers by sums (docs/cost-model.md).

By rows each distinct row crosses a hop once, as in an un-pooled table. By sums the ids of a bag go to the homes, over
the rail and then inside the node, and one vector comes back from every node, and every rank in it, that any id of the
bag is homed at; gradients take the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.homes import homes_of
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.cost import LoadSums
from flexd.planner.model.prices import latencies, prices
from flexd.planner.model.row_bytes import Exchange, Phase, TrafficLink, chain_byte_factors
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.model.workload import GroupLoad, make_table_loads
from flexd.sketch.profile import Profile, TableProfile
from flexd.topology.cluster import Cluster

Float64Array = npt.NDArray[np.float64]

LENGTH_RANKS = tuple((place + 0.5) / 64 for place in range(64))
"""Ranks of the quantiles that stand for the lengths of bags."""
_NARROW_KEYS = 2**31


@dataclass(frozen=True)
class AnswerBytes:
    """What a rank sends in a step for one table, with no copies, forward and backward, in the mean over the ranks.

    Attributes:
        bags: bags of a rank in a step.
        rows, sums: float64[2], bytes inside the nodes and between them.
    """

    bags: float
    rows: Float64Array
    sums: Float64Array


def answer_bytes(
    profile: Profile,
    keyspace: KeySpace,
    layout: RankLayout,
    lengths: Mapping[str, Float64Array],
    shape: TrainingShape | None = None,
) -> dict[str, AnswerBytes]:
    """Return the bytes of both answers of the named tables that were looked up and have a bag with an id.

    Args:
        lengths: by table float64[n] ids of a bag, equally likely: quantiles at ``LENGTH_RANKS``.

    Raises:
        PlanError: as ``make_loads``.
    """
    shape = shape or TrainingShape()
    wanted = {name: of_table for name, of_table in lengths.items() if len(of_table) and of_table.mean() > 0}
    if not wanted:
        return {}
    loads = make_table_loads(profile, keyspace, layout, shape)
    found = {}
    for index, seen in enumerate(profile.tables):
        if seen.table in wanted and seen.weight > 0:
            found[seen.table] = _of_load(loads[index], seen, index, keyspace, layout, wanted[seen.table], shape)
    return found


def _of_load(
    load: GroupLoad,
    seen: TableProfile,
    table: int,
    keyspace: KeySpace,
    layout: RankLayout,
    lengths: Float64Array,
    shape: TrainingShape,
) -> AnswerBytes:
    factors = chain_byte_factors(layout, load.wire_bytes)[Tier.HOME]
    by_link = np.einsum("pls,s->l", factors, LoadSums(load, layout).total())
    rows = by_link[[TrafficLink.INTRA_NODE, TrafficLink.INTER_NODE]]
    bags = seen.accesses_per_step / layout.world_size / float(lengths.mean())
    trained = 1.0 if seen.table not in shape.frozen_tables else 0.0
    id_bytes = 4 if homes_of(keyspace, layout).groups[-1].end_key <= _NARROW_KEYS else 8
    homes = home_shares(seen, table, keyspace, layout)
    # A rank is one of N in the first hop and one of L in the second: what it has itself does not travel.
    hops = (
        (homes, (layout.local_ranks - 1) / layout.local_ranks),
        (homes.reshape(layout.nodes, -1).sum(axis=1), (layout.nodes - 1) / layout.nodes),
    )
    sums = [
        bags
        * away
        * (id_bytes * float(lengths.mean()) + (1 + trained) * load.wire_bytes * parts_of_bag(shares, lengths))
        for shares, away in hops
    ]
    return AnswerBytes(bags, rows, np.array(sums))


def parts_of_bag(shares: Float64Array, lengths: Float64Array) -> float:
    """Return the places among which the ids of a bag are, expected: ``mean over m of sum (1 - (1 - share)^m)``.

    Args:
        shares: float64[places] of the accesses; ids of a bag are taken as independent of each other.
        lengths: float64[n] ids of a bag, equally likely.
    """
    missing = np.power(np.maximum(1.0 - shares, 0.0)[:, None], lengths)
    return float((1.0 - missing).sum(axis=0).mean())


def home_shares(seen: TableProfile, table: int, keyspace: KeySpace, layout: RankLayout) -> Float64Array:
    """float64[ranks]: share of a table's accesses to rows that are homed at each rank. Rows that the profile does not
    list are spread evenly over the ranks of its home rule."""
    homes = homes_of(keyspace, layout)
    home = homes.home_rank(keyspace.keys(table, seen.hot_rows))
    listed = np.bincount(home, weights=seen.hot_share.astype(np.float64), minlength=layout.world_size)
    ranks = homes.rules[table].ranks(layout)
    shares = np.asarray(listed, dtype=np.float64)
    shares[ranks.start : ranks.stop] += max(0.0, 1.0 - float(listed.sum())) / len(ranks)
    return shares


@dataclass(frozen=True)
class PooledTable:
    """The answer of a pooled table, and the one that takes less time.

    Attributes:
        answer, better: "rows" or "sums".
        rows_seconds, sums_seconds: of a step, transfers alone.
    """

    table: str
    answer: str
    better: str
    bytes: AnswerBytes
    rows_seconds: float
    sums_seconds: float

    def to_dict(self) -> dict[str, float | str]:
        """Return all fields, JSON-able, with units in the names."""
        return {
            "answer": self.answer,
            "better": self.better,
            "bags_per_step": self.bytes.bags,
            "rows_intra_node_bytes": float(self.bytes.rows[0]),
            "rows_inter_node_bytes": float(self.bytes.rows[1]),
            "sums_intra_node_bytes": float(self.bytes.sums[0]),
            "sums_inter_node_bytes": float(self.bytes.sums[1]),
            "rows_seconds": self.rows_seconds,
            "sums_seconds": self.sums_seconds,
        }


def choose_answers(
    of_tables: Mapping[str, AnswerBytes],
    answers: Mapping[str, str],
    cluster: Cluster,
    sent: Float64Array,
    layout: RankLayout,
    shape: TrainingShape,
) -> tuple[PooledTable, ...]:
    """Return the better answer of each table. All stay with rows if what sums save together does not pay for the
    collectives that they add to a step: sizes, ids, sums and gradients on every hop.

    Args:
        answers: "rows" or "sums" by table, as the job has them now.
        sent: float64[tier, phase, link] bytes of a rank and step, which the prices of a byte depend on.
    """
    passes = shape.micro_batches
    links = [TrafficLink.INTRA_NODE, TrafficLink.INTER_NODE]
    unit = prices(sent, cluster, passes)[Tier.HOME, Phase.FORWARD_ROWS, links]
    backward = 1 if shape.merged_backward else passes
    fixed = latencies(cluster, layout, Exchange.CHAIN, (), micro_batches=passes, backward_passes=backward).sum()
    seconds = {name: (float(unit @ one.rows), float(unit @ one.sums)) for name, one in of_tables.items()}
    pays = sum(max(0.0, of_rows - of_sums) for of_rows, of_sums in seconds.values()) > fixed
    return tuple(
        PooledTable(
            name,
            answers[name],
            "sums" if pays and seconds[name][1] < seconds[name][0] else "rows",
            one,
            *seconds[name],
        )
        for name, one in of_tables.items()
    )
