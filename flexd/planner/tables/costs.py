"""Loads of tables in the exchanges of flexd and of TorchRec, for every sharding type and pooling place
(docs/cost-model.md, "Tables" and "Tables of TorchRec").

In flexd rows take the chain: to the rank of the node that has the home's local rank, and over the rail to the home.
Sums take the rail first and the node second, so that one vector per bag crosses the network for each node that has any
of its ids. Rows that every rank has copies of travel never; their gradients are summed as those of rows at DEVICE.
Bytes are those of one optimizer step, with no copies of single rows.

In TorchRec ids travel without dedup by all-to-all. A pooled row-wise table answers by reduce-scatter over all ranks, a
table-row-wise one by reduce-scatter inside its node and all-to-all over the rails, the others by all-to-all; gradients
take the way back (torchrec.distributed.sharding, 1.9). Data-parallel tables sum dense gradients by all-reduce.

Loads of a sharding type and pooling place are float64[T, 4, axes]: by ``Part``, and by message, link (inside, between
nodes) and direction (sent, received). What one side sends the other receives, so that values travel as ids do with the
directions exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexd.core.arrays import Float64Array, Int64Array
from flexd.core.placement import RankLayout, Tier
from flexd.planner.model.prices import ID_BYTES, Exchange, TrafficPhase, exposed_share, latencies
from flexd.planner.model.workload import ACCESSES, ANYWHERE, BACK_PER_NODE, BACK_PER_RANK, PER_NODE, PER_RANK
from flexd.planner.tables.options import Part, PoolingAt, ShardingKind, TableOption, TableOptions, TableWork
from flexd.topology.cluster import INTER, INTRA, Cluster, Collective, Link

MESSAGES = ("ids", "values", "gradients")
_EVERY, _NODE, _RAIL, _RANK = Part
_IDS, _VALUES, _GRADIENTS, _SCATTERED, _GATHERED, _SUMMED = range(6)
_SENT, _RECEIVED = range(2)


@dataclass(frozen=True)
class _Bytes:
    """Accumulates loads.

    Attributes:
        of: float64[T, 4, message, link, direction].
    """

    of: Float64Array

    @classmethod
    def of_work(cls, work: TableWork, messages: int = len(MESSAGES)) -> _Bytes:
        return cls(np.zeros((len(work.names), len(Part), messages, len(Link), 2)))

    @property
    def by_axis(self) -> Float64Array:
        """float64[T, 4, axes]."""
        return self.of.reshape(*self.of.shape[:2], -1)

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

    def to_rank(self, message: int, layout: RankLayout, size: Float64Array) -> None:
        """Every other rank sends ``size`` straight to the home; values come back."""
        self.to(message, INTRA, (_NODE, _RANK), layout.local_ranks - 1, size)
        out, into = (_RECEIVED, _SENT) if message == _VALUES else (_SENT, _RECEIVED)
        between = self.of[:, :, message, INTER]
        between[:, _EVERY, out] += size
        between[:, _NODE, out] -= size
        between[:, _RANK, into] += (layout.world_size - layout.local_ranks) * size

    def ring(self, message: int, layout: RankLayout, size: Float64Array) -> None:
        """A ring over all ranks in which each sends ``size``, with one way out of each node."""
        share = 1.0 / layout.local_ranks if layout.nodes > 1 else 0.0
        self.even(message, INTER, size * share)
        self.even(message, INTRA, size * (1.0 - share))


def row_loads(work: TableWork, layout: RankLayout, rule: ShardingKind) -> Float64Array:
    """Return the loads of tables that are pooled at the requester: each distinct row once a hop."""
    nodes, local = layout.nodes, layout.local_ranks
    loads = _Bytes.of_work(work)
    statistics = work.statistics.T
    for message, size, of_rank, of_node in (
        (_IDS, np.full(len(work.names), float(ID_BYTES)), PER_RANK, PER_NODE),
        (_VALUES, work.wire_bytes, PER_RANK, PER_NODE),
        (_GRADIENTS, work.wire_bytes, BACK_PER_RANK, BACK_PER_NODE),
    ):
        rank, node = statistics[of_rank] * size, statistics[of_node] * size
        if rule is ShardingKind.TABLE_WISE:
            # The rank of a node that has the home's local rank stands between.
            loads.to(message, INTRA, (_EVERY, _RAIL), local - 1, rank)
            loads.to(message, INTER, (_RAIL, _RANK), nodes - 1, node)
            continue
        loads.even(message, INTRA, rank * (local - 1) / local)
        if rule is ShardingKind.TABLE_ROW_WISE:
            loads.to(message, INTER, (_EVERY, _NODE), nodes - 1, node / local)
        else:
            loads.even(message, INTER, node * (nodes - 1) / (nodes * local))
    return loads.by_axis


def sum_loads(work: TableWork, layout: RankLayout, rule: ShardingKind) -> Float64Array:
    """Return the loads of tables that are pooled at the owner: every id of a bag, and one vector per bag and place."""
    nodes, local, world = layout.nodes, layout.local_ranks, layout.world_size
    loads = _Bytes.of_work(work)
    accesses = work.statistics[:, ACCESSES]
    # Ids of a bag in the mean; 0 for un-pooled tables.
    length = accesses / np.where(work.bags > 0, work.bags, np.inf)
    for message in (_IDS, _VALUES, _GRADIENTS):
        vector = work.bags * work.wire_bytes * (work.trained if message == _GRADIENTS else 1.0)

        def size(places: int, of: int = message, vector: Float64Array = vector) -> Float64Array:
            """Bytes of a rank's bags whose ids are among so many places."""
            return accesses * work.id_bytes if of == _IDS else vector * parts_of_bags(length, places)

        if rule is ShardingKind.ROW_WISE:
            loads.even(message, INTER, size(nodes) * (nodes - 1) / nodes)
            loads.even(message, INTRA, size(world) * (local - 1) / local)
            continue
        loads.to(message, INTER, (_EVERY, _NODE), nodes - 1, size(1))
        if rule is ShardingKind.TABLE_WISE:
            loads.to(message, INTRA, (_NODE, _RANK), local - 1, nodes * size(1))
        else:
            loads.of[:, _NODE, message, INTRA] += (nodes * size(local) * (local - 1) / local)[:, None]
    return loads.by_axis


def copy_loads(work: TableWork, layout: RankLayout) -> Float64Array:
    """Return float64[T, 4, 16], the loads of tables that every rank has copies of: those of rows, then what is sent and
    received inside and between nodes to sum gradients.

    As rows at DEVICE in the chain (``row_bytes.byte_factors``): one bit a row travels with ids and with rows,
    gradients climb to the node owner with those of other rows, the owners of a rail all-reduce them, and the ranks of
    a node receive the sums.
    """
    nodes, local = layout.nodes, layout.local_ranks
    hop1, hop2 = (local - 1) / local, (nodes - 1) / (nodes * local)
    with_rows = _Bytes.of_work(work)
    bits = work.rows * work.trained / 8
    for message in (_IDS, _VALUES):
        with_rows.even(message, INTRA, bits * hop1)
        with_rows.even(message, INTER, bits * hop2)
    statistics = work.statistics.T
    with_rows.even(_GRADIENTS, INTRA, statistics[BACK_PER_RANK] * work.wire_bytes * hop1)
    summed = _Bytes.of_work(work, 1)
    summed.even(0, INTRA, statistics[ANYWHERE] * work.wire_bytes * hop1)
    summed.even(0, INTER, 2 * statistics[ANYWHERE] * work.wire_bytes * hop2)
    return np.concatenate([with_rows.by_axis, summed.by_axis], axis=2)


def parts_of_bags(length: Float64Array, places: int) -> Float64Array:
    """Return float64[T]: of ``places`` equally likely places those that have any of a bag's ids, expected.

    With less than one id in the mean, so many bags are taken as empty.
    """
    found: Float64Array = places * (1.0 - np.power(1.0 - 1.0 / places, np.maximum(length, 1.0)))
    return found * np.minimum(length, 1.0)


def kernel_bytes(work: TableWork, layout: RankLayout, option: TableOption) -> Float64Array:
    """Return float64[T, 4, 2]: bytes that look-up and update of a piece read and write in a rank's memory."""
    nodes, world, rule = layout.nodes, layout.world_size, option.rule
    loads = np.zeros((len(work.names), len(Part), 2))
    statistics, size = work.statistics.T, work.row_bytes
    part, ranks = option.held(layout)
    stored = 2 * statistics[ANYWHERE] * (size + work.state_bytes)
    accesses = statistics[ACCESSES] * size
    if option.pooling_at is PoolingAt.OWNER:
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


CHAIN_OPTIONS = (
    TableOption(ShardingKind.ROW_WISE, PoolingAt.REQUESTER),
    TableOption(ShardingKind.ROW_WISE, PoolingAt.OWNER),
    TableOption(ShardingKind.TABLE_ROW_WISE, PoolingAt.REQUESTER),
    TableOption(ShardingKind.TABLE_ROW_WISE, PoolingAt.OWNER),
    TableOption(ShardingKind.TABLE_WISE, PoolingAt.REQUESTER),
    TableOption(ShardingKind.TABLE_WISE, PoolingAt.OWNER),
    TableOption(ShardingKind.DATA_PARALLEL, PoolingAt.NONE),
)
"""Options that the runtime has for a table."""
CHAIN_PHASES = (
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
# Load axes of a pooling place.
_EXCHANGED = 2 * len(MESSAGES) * len(Link)


# The messages that sum gradients of copies, by link.
_SUMS = (
    (Link.INTRA_NODE, TrafficPhase.SYNC_SUMS, Collective.ALL_TO_ALL),
    (Link.INTER_NODE, TrafficPhase.SYNC_ROWS, Collective.ALL_REDUCE),
)


ROW_BYTES_PER_SECOND = 0.8e12
"""At which look-ups and updates read and write rows, where step costs are not measured: an assumption, half of the
1,555 GB/s in the data sheet of an A100 with 40 GB."""


def chain_options(
    work: TableWork, layout: RankLayout, cluster: Cluster, options: Sequence[TableOption] = CHAIN_OPTIONS
) -> TableOptions:
    """Return the loads of the options in flexd's exchange, sent and received bytes in every phase.

    Args:
        cluster: bandwidths at the message sizes of rows spread over all ranks, exposed shares, and the step costs that
            were measured: what a pooling place takes beside bytes is the larger of those and of the latencies.
        options: the first is what everything is compared with.
    """
    costs = cluster.step_costs
    axis = _axes(CHAIN_PHASES)
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
        loads[:, at, :, -2:] = kernel_bytes(work, layout, option)
        part, share = option.held(layout)
        memory[:, at, part] = work.stored_bytes / share
        allowed[:, at] = (work.bags > 0) | (not sums)
        if layout.nodes == 1 and option.rule is ShardingKind.TABLE_ROW_WISE:
            allowed[:, at] = False
    # Messages are priced at the size that they have when all tables are spread over all ranks and are pooled at the
    # requester, in both pooling places.
    sizes = loads[:, 0, Part.EVERYWHERE, :_EXCHANGED].sum(axis=0).reshape(len(MESSAGES), len(Link), 2)[:, :, _SENT]
    messages = [
        (link, phase, Collective.ALL_TO_ALL, float(sizes[message, at]))
        for message, phase in enumerate(
            (TrafficPhase.FORWARD_IDS, TrafficPhase.FORWARD_ROWS, TrafficPhase.BACKWARD_ROWS)
        )
        for at, link in enumerate(Link)
    ] * 2
    summed = loads[:, :, Part.EVERYWHERE, 2 * _EXCHANGED : -2 : 2].max(axis=1, initial=0).sum(axis=0)
    messages += [(*how, float(size)) for how, size in zip(_SUMS, summed, strict=True)]
    row_bytes_per_second = ROW_BYTES_PER_SECOND if costs is None else costs.row_bytes_per_second

    def fixed(*tiers: Tier) -> float:
        return float(latencies(cluster, layout, Exchange.CHAIN, tiers).sum())

    with_sums, with_copies = fixed(), fixed(Tier.DEVICE) - fixed()
    if costs is not None:
        with_sums = max(with_sums, costs.sums_seconds)
        with_copies = max(with_copies, costs.copies_seconds)
    return TableOptions(
        work.names, tuple(options), CHAIN_PHASES, axis, _unit_seconds(cluster, messages, row_bytes_per_second), loads,
        memory, allowed, ((PoolingAt.OWNER, with_sums), (PoolingAt.NONE, with_copies)),
    )  # fmt: skip


def _axes(phases: Sequence[str]) -> Int64Array:
    """Return int64[axes], the phase of each: two of an exchange, one of a kernel (the last two phases)."""
    return np.repeat(np.arange(len(phases)), [2] * (len(phases) - 2) + [1, 1])


def _unit_seconds(
    cluster: Cluster, messages: Sequence[tuple[Link, TrafficPhase, Collective, float]], row_bytes_per_second: float
) -> Float64Array:
    """Return float64[phases]: seconds per byte of messages of these sizes, and of the two kernels."""
    shares = exposed_share(cluster.exposed)
    seconds = [
        cluster.curve(link, collective).seconds_per_byte(max(size, 1.0)) * float(shares[phase])
        for link, phase, collective, size in messages
    ]
    return np.array([*seconds, *[1.0 / row_bytes_per_second] * 2])


MIN_COLUMNS = 32
"""Narrower column shards are not made (TorchRec's planner: MIN_CW_DIM)."""
TORCHREC_OPTIONS = (
    TableOption(ShardingKind.ROW_WISE, PoolingAt.OWNER),
    TableOption(ShardingKind.TABLE_ROW_WISE, PoolingAt.OWNER),
    TableOption(ShardingKind.TABLE_WISE, PoolingAt.OWNER),
    TableOption(ShardingKind.DATA_PARALLEL, PoolingAt.OWNER),
    TableOption(ShardingKind.COLUMN_WISE, PoolingAt.OWNER, 2),
    TableOption(ShardingKind.COLUMN_WISE, PoolingAt.OWNER, 4),
)
"""Options that TorchRec has for a table; un-pooled tables have no table-row-wise."""
_TORCHREC_MESSAGES = (
    ("ids", TrafficPhase.FORWARD_IDS, Collective.ALL_TO_ALL),
    ("values", TrafficPhase.FORWARD_ROWS, Collective.ALL_TO_ALL),
    ("gradients", TrafficPhase.BACKWARD_ROWS, Collective.ALL_TO_ALL),
    ("scattered_values", TrafficPhase.FORWARD_ROWS, Collective.ALL_GATHER),
    ("gathered_gradients", TrafficPhase.BACKWARD_ROWS, Collective.ALL_GATHER),
    ("summed_gradients", TrafficPhase.BACKWARD_ROWS, Collective.ALL_REDUCE),
)
TORCHREC_PHASES = (*(f"{name}_{link}" for name, _, _ in _TORCHREC_MESSAGES for link in Link), "lookup", "update")


def torchrec_options(
    work: TableWork,
    dims: Sequence[int],
    layout: RankLayout,
    cluster: Cluster,
    options: Sequence[TableOption] = TORCHREC_OPTIONS,
) -> TableOptions:
    """Return the loads of TorchRec's shardings, sent and received bytes in every phase.

    Rows of a row-wise table are taken as evenly asked for; TorchRec cuts them in blocks by id. Latencies are left out.
    """
    loads = np.stack([_torchrec_loads(work, layout, option) for option in options], axis=1)
    memory = np.zeros((len(work.names), len(options), len(Part)))
    allowed = np.ones(memory.shape[:2], bool)
    for at, option in enumerate(options):
        part, share = option.held(layout)
        memory[:, at, part] = work.stored_bytes / share
        if option.rule is ShardingKind.DATA_PARALLEL:
            memory[:, at, part] += work.rows * work.row_bytes * work.trained  # the dense gradient
        if option.rule is ShardingKind.TABLE_ROW_WISE:
            allowed[:, at] = (work.bags > 0) & (layout.nodes > 1)
        if option.rule is ShardingKind.COLUMN_WISE:
            columns = np.array(dims) / option.pieces
            allowed[:, at] = (columns >= MIN_COLUMNS) & (columns % 4 == 0) & (option.pieces <= layout.world_size)
    # Messages are priced at the size that they have when all tables are row-wise, or that of each if it is used alone.
    exchanged = loads[..., :-2].reshape(*loads.shape[:3], len(_TORCHREC_MESSAGES), len(Link), 2)
    sizes = exchanged[:, :, _EVERY, :, :, _SENT].max(axis=1, initial=0).sum(axis=0)
    messages = [
        (link, phase, collective, float(sizes[message, at]))
        for message, (_, phase, collective) in enumerate(_TORCHREC_MESSAGES)
        for at, link in enumerate(Link)
    ]
    return TableOptions(
        work.names, tuple(options), TORCHREC_PHASES, _axes(TORCHREC_PHASES),
        _unit_seconds(cluster, messages, ROW_BYTES_PER_SECOND), loads, memory, allowed,
    )  # fmt: skip


def _torchrec_loads(work: TableWork, layout: RankLayout, option: TableOption) -> Float64Array:
    """Return float64[T, 4, axes] of one piece."""
    nodes, local, world = layout.nodes, layout.local_ranks, layout.world_size
    bytes_ = _Bytes.of_work(work, len(_TORCHREC_MESSAGES))
    accesses, pooled = work.statistics[:, ACCESSES], work.bags > 0
    ids = accesses * work.id_bytes
    vectors = np.where(pooled, work.bags, accesses) * work.wire_bytes / option.pieces
    trained = vectors * work.trained
    if option.rule in (ShardingKind.TABLE_WISE, ShardingKind.COLUMN_WISE):
        for message, size in ((_IDS, ids), (_VALUES, vectors), (_GRADIENTS, trained)):
            bytes_.to_rank(message, layout, size)
    elif option.rule is ShardingKind.ROW_WISE:
        for message, size in ((_IDS, ids), (_VALUES, vectors * ~pooled), (_GRADIENTS, trained * ~pooled)):
            bytes_.even(message, INTRA, size * (local - 1) / world)
            bytes_.even(message, INTER, size * (world - local) / world)
        for message, size in ((_SCATTERED, vectors * pooled), (_GATHERED, trained * pooled)):
            bytes_.ring(message, layout, size * (world - 1))
    elif option.rule is ShardingKind.TABLE_ROW_WISE:
        of = bytes_.of
        of[:, _NODE, _IDS, INTRA] += (ids * (local - 1) / local)[:, None]
        of[:, _EVERY, _IDS, INTER, _SENT] += ids
        of[:, _NODE, _IDS, INTER, _SENT] -= ids
        of[:, _NODE, _IDS, INTER, _RECEIVED] += (world - local) / local * ids
        for scattered, rail, size, home in (
            (_SCATTERED, _VALUES, vectors, _SENT), (_GATHERED, _GRADIENTS, trained, _RECEIVED),
        ):  # fmt: skip
            of[:, _NODE, scattered, INTRA] += (nodes * (local - 1) * size)[:, None]
            of[:, _NODE, rail, INTER, home] += (nodes - 1) * size
            of[:, _EVERY, rail, INTER, 1 - home] += size
            of[:, _NODE, rail, INTER, 1 - home] -= size
    else:
        bytes_.ring(_SUMMED, layout, 2 * (world - 1) / world * work.rows * work.row_bytes * work.trained)
    kernels = np.zeros((len(work.names), len(Part), 2))
    if option.rule is ShardingKind.DATA_PARALLEL:
        kernels[:, _EVERY, 0] = accesses * work.row_bytes + vectors
        kernels[:, _EVERY, 1] = (2 * work.stored_bytes + 2 * work.rows * work.row_bytes) * work.trained
    else:
        kernels = kernel_bytes(work, layout, option)
    return np.concatenate([bytes_.by_axis, kernels], axis=2)
