"""Loads of flexd's own exchanges for every sharding type and pooling place (docs/cost-model.md, "Tables").

Rows take the chain: to the rank of the node that has the home's local rank, and over the rail to the home. Sums take
the rail first and the node second, so that one vector per bag crosses the network for each node that has any of its
ids. Rows that every rank has copies of travel never; their gradients are summed as those of rows at DEVICE.
Bytes are those of one optimizer step, with no copies of single rows.

Loads of a sharding type and pooling place are float64[T, 4, 12]: by ``Part``, and by message (ids, values, gradients),
link (inside, between nodes) and direction (sent, received). What one side sends the other receives, so that values
travel as ids do with the directions exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.prices import exposed_share, latencies
from flexd.planner.model.row_bytes import ID_BYTES, Exchange, Phase
from flexd.planner.model.workload import ACCESSES, ANYWHERE, BACK_PER_NODE, BACK_PER_RANK, PER_NODE, PER_RANK
from flexd.planner.tables.options import Option, Part, PoolingAt, ShardingKind, TableOptions, TableWork
from flexd.topology.cluster import Cluster, Collective, Link

Float64Array = npt.NDArray[np.float64]

MESSAGES = ("ids", "values", "gradients")
LINKS = 2
_EVERY, _NODE, _RAIL, _RANK = Part
_IDS, _VALUES, _GRADIENTS = range(3)
_INTRA, _INTER = range(LINKS)
_SENT, _RECEIVED = range(2)


@dataclass
class _Bytes:
    """Accumulates loads.

    Attributes:
        of: float64[T, 4, message, link, direction].
    """

    of: Float64Array

    def even(self, message: int, link: int, size: Float64Array) -> None:
        """Every rank sends and receives as much."""
        self.of[:, _EVERY, message, link] += size[:, None]

    def to(self, message: int, link: int, place: tuple[Part, Part], senders: int, size: Float64Array) -> None:
        """Ranks send ``size`` to a place that has ``senders`` of them and sends itself nothing; values come back.

        Args:
            place: who sends, and who of them receives instead.
        """
        every, home = place
        asks = (_SENT, _RECEIVED) if message != _VALUES else (_RECEIVED, _SENT)
        self.of[:, every, message, link, asks[0]] += size
        self.of[:, home, message, link, asks[0]] -= size
        self.of[:, home, message, link, asks[1]] += senders * size


def row_loads(work: TableWork, layout: RankLayout, rule: ShardingKind) -> Float64Array:
    """Return the loads of tables that are pooled at the requester: each distinct row once a hop."""
    nodes, local = layout.nodes, layout.local_ranks
    loads = _Bytes(np.zeros((len(work.names), len(Part), len(MESSAGES), LINKS, 2)))
    statistics = work.statistics.T
    for message, size, of_rank, of_node in (
        (_IDS, np.full(len(work.names), float(ID_BYTES)), PER_RANK, PER_NODE),
        (_VALUES, work.wire_bytes, PER_RANK, PER_NODE),
        (_GRADIENTS, work.wire_bytes, BACK_PER_RANK, BACK_PER_NODE),
    ):
        rank, node = statistics[of_rank] * size, statistics[of_node] * size
        if rule is ShardingKind.TABLE_WISE:
            # The rank of a node that has the home's local rank stands between.
            loads.to(message, _INTRA, (_EVERY, _RAIL), local - 1, rank)
            loads.to(message, _INTER, (_RAIL, _RANK), nodes - 1, node)
            continue
        loads.even(message, _INTRA, rank * (local - 1) / local)
        if rule is ShardingKind.TABLE_ROW_WISE:
            loads.to(message, _INTER, (_EVERY, _NODE), nodes - 1, node / local)
        else:
            loads.even(message, _INTER, node * (nodes - 1) / (nodes * local))
    return loads.of.reshape(len(work.names), len(Part), -1)


def sum_loads(work: TableWork, layout: RankLayout, rule: ShardingKind) -> Float64Array:
    """Return the loads of tables that are pooled at the owner: every id of a bag, and one vector per bag and place."""
    nodes, local, world = layout.nodes, layout.local_ranks, layout.world_size
    loads = _Bytes(np.zeros((len(work.names), len(Part), len(MESSAGES), LINKS, 2)))
    accesses, length = work.statistics[:, ACCESSES], work.bag_length
    for message in (_IDS, _VALUES, _GRADIENTS):
        vector = work.bags * work.wire_bytes * (work.trained if message == _GRADIENTS else 1.0)

        def size(places: int, of: int = message, vector: Float64Array = vector) -> Float64Array:
            """Bytes of a rank's bags whose ids are among so many places."""
            return accesses * work.id_bytes if of == _IDS else vector * parts_of_bags(length, places)

        if rule is ShardingKind.ROW_WISE:
            loads.even(message, _INTER, size(nodes) * (nodes - 1) / nodes)
            loads.even(message, _INTRA, size(world) * (local - 1) / local)
            continue
        loads.to(message, _INTER, (_EVERY, _NODE), nodes - 1, size(1))
        if rule is ShardingKind.TABLE_WISE:
            loads.to(message, _INTRA, (_NODE, _RANK), local - 1, nodes * size(1))
        else:
            loads.of[:, _NODE, message, _INTRA] += (nodes * size(local) * (local - 1) / local)[:, None]
    return loads.of.reshape(len(work.names), len(Part), -1)


def copy_loads(work: TableWork, layout: RankLayout) -> Float64Array:
    """Return float64[T, 4, 16], the loads of tables that every rank has copies of: those of rows, then what is sent and
    received inside and between nodes to sum gradients.

    As rows at DEVICE in the chain (``row_bytes.chain_byte_factors``): one bit a row travels with ids and with rows,
    gradients climb to the node owner with those of other rows, the owners of a rail all-reduce them, and the ranks of
    a node receive the sums.
    """
    nodes, local = layout.nodes, layout.local_ranks
    hop1, hop2 = (local - 1) / local, (nodes - 1) / (nodes * local)
    with_rows = _Bytes(np.zeros((len(work.names), len(Part), len(MESSAGES), LINKS, 2)))
    bits = work.rows * work.trained / 8
    for message in (_IDS, _VALUES):
        with_rows.even(message, _INTRA, bits * hop1)
        with_rows.even(message, _INTER, bits * hop2)
    statistics = work.statistics.T
    with_rows.even(_GRADIENTS, _INTRA, statistics[BACK_PER_RANK] * work.wire_bytes * hop1)
    summed = np.zeros((len(work.names), len(Part), LINKS, 2))
    summed[:, _EVERY, _INTRA] += (statistics[ANYWHERE] * work.wire_bytes * hop1)[:, None]
    summed[:, _EVERY, _INTER] += (2 * statistics[ANYWHERE] * work.wire_bytes * hop2)[:, None]
    flat = (len(work.names), len(Part), -1)
    return np.concatenate([with_rows.of.reshape(flat), summed.reshape(flat)], axis=2)


def parts_of_bags(length: Float64Array, places: int) -> Float64Array:
    """Return float64[T]: of ``places`` equally likely places those that have any of a bag's ids, expected.

    With less than one id in the mean, so many bags are taken as empty.
    """
    found: Float64Array = places * (1.0 - np.power(1.0 - 1.0 / places, np.maximum(length, 1.0)))
    return found * np.minimum(length, 1.0)


def kernel_bytes(work: TableWork, layout: RankLayout, rule: ShardingKind, *, sums: bool) -> Float64Array:
    """Return float64[T, 4, 2]: bytes that look-up and update read and write in a rank's memory."""
    nodes, world = layout.nodes, layout.world_size
    loads = np.zeros((len(work.names), len(Part), 2))
    statistics, size = work.statistics.T, work.row_bytes
    part, ranks = {
        ShardingKind.ROW_WISE: (_EVERY, world), ShardingKind.TABLE_ROW_WISE: (_NODE, layout.local_ranks),
        ShardingKind.TABLE_WISE: (_RANK, 1),
        ShardingKind.DATA_PARALLEL: (_EVERY, 1),
    }[rule]  # fmt: skip
    stored = 2 * statistics[ANYWHERE] * (size + work.state_bytes)
    accesses = statistics[ACCESSES] * size
    if sums:
        loads[:, part, 0] = accesses * world / ranks
        loads[:, part, 1] = (accesses * world * work.trained + stored) / ranks
        return loads
    # Where rows are looked up those of a bag are added up, or each look-up is written out; gradients the other way.
    loads[:, _EVERY, 0] = accesses + np.where(work.bags > 0, work.bags * size, accesses)
    loads[:, _EVERY, 1] = (accesses + statistics[BACK_PER_RANK] * size) * work.trained
    if rule is ShardingKind.DATA_PARALLEL:
        loads[:, _EVERY, 0] += statistics[PER_RANK] * size
        loads[:, _EVERY, 1] += stored
        return loads
    station, share = (_RAIL, layout.local_ranks) if rule is ShardingKind.TABLE_WISE else (_EVERY, 1)
    loads[:, station, 0] += statistics[PER_RANK] * size * share
    loads[:, station, 1] += statistics[BACK_PER_RANK] * size * share
    loads[:, part, 0] += nodes * statistics[PER_NODE] * size / ranks
    loads[:, part, 1] += (nodes * statistics[BACK_PER_NODE] * size + stored) / ranks
    return loads


OPTIONS = (
    Option(ShardingKind.ROW_WISE, PoolingAt.REQUESTER),
    Option(ShardingKind.ROW_WISE, PoolingAt.OWNER),
    Option(ShardingKind.TABLE_ROW_WISE, PoolingAt.REQUESTER),
    Option(ShardingKind.TABLE_ROW_WISE, PoolingAt.OWNER),
    Option(ShardingKind.TABLE_WISE, PoolingAt.REQUESTER),
    Option(ShardingKind.TABLE_WISE, PoolingAt.OWNER),
    Option(ShardingKind.DATA_PARALLEL, PoolingAt.NONE),
)
"""What the runtime can do with a table."""
PHASES = (
    *(
        f"{pooling_at}_{message}_{link}"
        for pooling_at in (PoolingAt.REQUESTER, PoolingAt.OWNER)
        for message in MESSAGES
        for link in Link
    ),
    *(f"summed_gradients_{link}" for link in Link),
    "lookup",
    "update",
)
"""Each pooling place has collectives of its own, and so have the gradients of tables that every rank has; look-ups and
updates of all run together."""
_EXCHANGED = 2 * len(MESSAGES) * len(Link)
"""Load axes of a pooling place."""


_SUMMED = (
    (Link.INTRA_NODE, Phase.SYNC_SUMS, Collective.ALL_TO_ALL),
    (Link.INTER_NODE, Phase.SYNC_ROWS, Collective.ALL_REDUCE),
)
"""How gradients of copies are summed, by link."""


ROW_BYTES_PER_SECOND = 0.8e12
"""At which look-ups and updates read and write rows, where step costs are not measured: an assumption, half of the
1,555 GB/s in the data sheet of an A100 with 40 GB."""


def chain_options(
    work: TableWork,
    layout: RankLayout,
    cluster: Cluster,
    options: Sequence[Option] = OPTIONS,
) -> TableOptions:
    """Return the loads of the options, sent and received bytes in every phase.

    Args:
        cluster: bandwidths at the message sizes of rows spread over all ranks, exposed shares, and the step costs that
            were measured: what a pooling place takes beside bytes is the larger of those and of the latencies.
        options: the first is what everything is compared with.
    """
    costs = cluster.step_costs
    exchanges = len(PHASES) - 2
    axis = np.concatenate([np.repeat(np.arange(exchanges), 2), [exchanges, exchanges + 1]])
    loads = np.zeros((len(work.names), len(options), len(Part), len(axis)))
    memory = np.zeros((len(work.names), len(options), len(Part)))
    allowed = np.ones(loads.shape[:2], bool)
    for at, option in enumerate(options):
        sums = option.pooling_at is PoolingAt.OWNER
        if option.rule is ShardingKind.DATA_PARALLEL:
            copied = copy_loads(work, layout)
            loads[:, at, :, :_EXCHANGED] = copied[:, :, :_EXCHANGED]
            loads[:, at, :, 2 * _EXCHANGED : -2] = copied[:, :, _EXCHANGED:]
        else:
            first = _EXCHANGED if sums else 0
            of = sum_loads if sums else row_loads
            loads[:, at, :, first : first + _EXCHANGED] = of(work, layout, option.rule)
        loads[:, at, :, -2:] = kernel_bytes(work, layout, option.rule, sums=sums)
        part, ranks = {
            ShardingKind.ROW_WISE: (Part.EVERYWHERE, layout.world_size),
            ShardingKind.TABLE_ROW_WISE: (Part.HOME_NODE, layout.local_ranks),
            ShardingKind.TABLE_WISE: (Part.HOME_RANK, 1),
            # A rank's own part of the rows needs no copy there.
            ShardingKind.DATA_PARALLEL: (Part.EVERYWHERE, 1),
        }[option.rule]
        memory[:, at, part] = work.stored_bytes / ranks
        allowed[:, at] = (work.bags > 0) | (not sums)
        if layout.nodes == 1 and option.rule is ShardingKind.TABLE_ROW_WISE:
            allowed[:, at] = False
    shares = exposed_share(cluster)
    # Messages are priced at the size that they have when all tables are spread over all ranks and are pooled at the
    # requester.
    sizes = loads[:, 0, Part.EVERYWHERE].sum(axis=0)
    seconds = []
    for _ in (PoolingAt.REQUESTER, PoolingAt.OWNER):
        for message, phase in enumerate((Phase.FORWARD_IDS, Phase.FORWARD_ROWS, Phase.BACKWARD_ROWS)):
            for at, link in enumerate(Link):
                size = float(sizes[2 * (message * len(Link) + at)])
                curve = cluster.curve(link, Collective.ALL_TO_ALL)
                seconds.append(curve.seconds_per_byte(max(size, 1.0)) * float(shares[phase]))
    summed = loads[:, :, Part.EVERYWHERE, 2 * _EXCHANGED : -2 : 2].max(axis=1, initial=0).sum(axis=0)
    for at, (link, phase, collective) in enumerate(_SUMMED):
        curve = cluster.curve(link, collective)
        seconds.append(curve.seconds_per_byte(max(float(summed[at]), 1.0)) * float(shares[phase]))
    seconds += [1.0 / (ROW_BYTES_PER_SECOND if costs is None else costs.row_bytes_per_second)] * 2

    def fixed(*tiers: Tier) -> float:
        return float(latencies(cluster, layout, Exchange.CHAIN, tiers).sum())

    with_sums, with_copies = fixed(), fixed(Tier.DEVICE) - fixed()
    if costs is not None:
        with_sums = max(with_sums, costs.sums_seconds)
        with_copies = max(with_copies, costs.copies_seconds)
    return TableOptions(
        work.names,
        tuple(options),
        PHASES,
        axis.astype(np.int64),
        np.array(seconds),
        loads,
        memory,
        allowed,
        ((PoolingAt.OWNER, with_sums), (PoolingAt.NONE, with_copies)),
    )
