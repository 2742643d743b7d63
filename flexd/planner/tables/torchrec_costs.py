"""Loads of TorchRec's own shardings (docs/cost-model.md, "Tables of TorchRec").

Ids travel without dedup by all-to-all. A pooled row-wise table answers by reduce-scatter over all ranks, a
table-row-wise one by reduce-scatter inside its node and all-to-all over the rails, the others by all-to-all; gradients
take the way back (torchrec.distributed.sharding, 1.9). Data-parallel tables sum dense gradients by all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout
from flexd.planner.model.prices import exposed_share
from flexd.planner.model.row_bytes import Phase
from flexd.planner.model.workload import ACCESSES
from flexd.planner.tables.chain_costs import ROW_BYTES_PER_SECOND, kernel_bytes
from flexd.planner.tables.options import Option, Part, PoolingAt, ShardingKind, TableOptions, TableWork
from flexd.topology.cluster import Cluster, Collective, Link

Float64Array = npt.NDArray[np.float64]

MIN_COLUMNS = 32
"""Narrower column shards are not made (TorchRec's planner: MIN_CW_DIM)."""
OPTIONS = (
    Option(ShardingKind.ROW_WISE, PoolingAt.OWNER),
    Option(ShardingKind.TABLE_ROW_WISE, PoolingAt.OWNER),
    Option(ShardingKind.TABLE_WISE, PoolingAt.OWNER),
    Option(ShardingKind.DATA_PARALLEL, PoolingAt.OWNER),
    Option(ShardingKind.COLUMN_WISE, PoolingAt.OWNER, 2),
    Option(ShardingKind.COLUMN_WISE, PoolingAt.OWNER, 4),
)
"""What TorchRec can do with a table; un-pooled tables have no table-row-wise."""
SHARDING_TYPES = {
    ShardingKind.ROW_WISE: "row_wise",
    ShardingKind.TABLE_ROW_WISE: "table_row_wise",
    ShardingKind.TABLE_WISE: "table_wise",
    ShardingKind.DATA_PARALLEL: "data_parallel",
    ShardingKind.COLUMN_WISE: "column_wise",
}
"""TorchRec's names (torchrec.distributed.types.ShardingType)."""
_MESSAGES = (
    ("ids", Phase.FORWARD_IDS, Collective.ALL_TO_ALL),
    ("values", Phase.FORWARD_ROWS, Collective.ALL_TO_ALL),
    ("gradients", Phase.BACKWARD_ROWS, Collective.ALL_TO_ALL),
    ("scattered_values", Phase.FORWARD_ROWS, Collective.ALL_GATHER),
    ("gathered_gradients", Phase.BACKWARD_ROWS, Collective.ALL_GATHER),
    ("summed_gradients", Phase.BACKWARD_ROWS, Collective.ALL_REDUCE),
)
PHASES = (*(f"{name}_{link}" for name, _, _ in _MESSAGES for link in Link), "lookup", "update")
_IDS, _VALUES, _GRADIENTS, _SCATTERED, _GATHERED, _SUMMED = range(len(_MESSAGES))
_INTRA, _INTER = range(len(Link))
_SENT, _RECEIVED = range(2)
_EVERY, _NODE, _RAIL, _RANK = Part


def torchrec_options(
    work: TableWork,
    dims: Sequence[int],
    layout: RankLayout,
    cluster: Cluster,
    options: Sequence[Option] = OPTIONS,
) -> TableOptions:
    """Return the loads of TorchRec's shardings, sent and received bytes in every phase.

    Rows of a row-wise table are taken as evenly asked for; TorchRec cuts them in blocks by id. Latencies are left out.
    """
    loads = np.stack([_loads(work, layout, option) for option in options], axis=1)
    memory = np.zeros((len(work.names), len(options), len(Part)))
    allowed = np.ones(memory.shape[:2], bool)
    for at, option in enumerate(options):
        part, share = _held(option, layout)
        memory[:, at, part] = work.stored_bytes / share
        if option.rule is ShardingKind.DATA_PARALLEL:
            memory[:, at, part] += work.rows * work.row_bytes * work.trained  # the dense gradient
        if option.rule is ShardingKind.TABLE_ROW_WISE:
            allowed[:, at] = (work.bags > 0) & (layout.nodes > 1)
        if option.rule is ShardingKind.COLUMN_WISE:
            columns = np.array(dims) / option.pieces
            allowed[:, at] = (columns >= MIN_COLUMNS) & (columns % 4 == 0) & (option.pieces <= layout.world_size)
    # Messages are priced at the size that they have when all tables are row-wise, or that of each if it is used alone.
    shares = exposed_share(cluster)
    seconds = []
    exchanged = loads[..., :-2].reshape(*loads.shape[:3], len(_MESSAGES), len(Link), 2)
    for message, (_, phase, collective) in enumerate(_MESSAGES):
        for at, link in enumerate(Link):
            size = float(exchanged[:, :, _EVERY, message, at, _SENT].max(axis=1, initial=0).sum())
            seconds.append(cluster.curve(link, collective).seconds_per_byte(max(size, 1.0)) * float(shares[phase]))
    seconds += [1.0 / ROW_BYTES_PER_SECOND] * 2
    exchanges = len(PHASES) - 2
    axis = np.concatenate([np.repeat(np.arange(exchanges), 2), [exchanges, exchanges + 1]])
    return TableOptions(
        work.names, tuple(options), PHASES, axis.astype(np.int64), np.array(seconds), loads, memory, allowed
    )  # fmt: skip


def _held(option: Option, layout: RankLayout) -> tuple[Part, float]:
    """Who holds a piece of the table, and how many pieces of memory the table is cut into."""
    return {
        ShardingKind.ROW_WISE: (_EVERY, float(layout.world_size)),
        ShardingKind.TABLE_ROW_WISE: (_NODE, float(layout.local_ranks)),
        ShardingKind.TABLE_WISE: (_RANK, 1.0),
        ShardingKind.DATA_PARALLEL: (_EVERY, 1.0),
        ShardingKind.COLUMN_WISE: (_RANK, float(option.pieces)),
    }[option.rule]


@dataclass
class _Bytes:
    """Attributes: of: float64[T, 4, message, link, direction]."""

    of: Float64Array

    def even(self, message: int, link: int, size: Float64Array) -> None:
        self.of[:, _EVERY, message, link] += size[:, None]

    def to_rank(self, message: int, layout: RankLayout, size: Float64Array) -> None:
        """Every other rank sends ``size`` to the home; values come back."""
        out, into = (_RECEIVED, _SENT) if message == _VALUES else (_SENT, _RECEIVED)
        inside, between = self.of[:, :, message, _INTRA], self.of[:, :, message, _INTER]
        inside[:, _NODE, out] += size
        inside[:, _RANK, out] -= size
        inside[:, _RANK, into] += (layout.local_ranks - 1) * size
        between[:, _EVERY, out] += size
        between[:, _NODE, out] -= size
        between[:, _RANK, into] += (layout.world_size - layout.local_ranks) * size

    def ring(self, message: int, layout: RankLayout, size: Float64Array) -> None:
        """A ring over all ranks in which each sends ``size``, with one way out of each node."""
        share = 1.0 / layout.local_ranks if layout.nodes > 1 else 0.0
        self.even(message, _INTER, size * share)
        self.even(message, _INTRA, size * (1.0 - share))


def _loads(work: TableWork, layout: RankLayout, option: Option) -> Float64Array:
    """Return float64[T, 4, axes] of one piece."""
    nodes, local, world = layout.nodes, layout.local_ranks, layout.world_size
    bytes_ = _Bytes(np.zeros((len(work.names), len(Part), len(_MESSAGES), len(Link), 2)))
    accesses, pooled = work.statistics[:, ACCESSES], work.bags > 0
    ids = accesses * work.id_bytes
    vectors = np.where(pooled, work.bags, accesses) * work.wire_bytes / option.pieces
    trained = vectors * work.trained
    if option.rule in (ShardingKind.TABLE_WISE, ShardingKind.COLUMN_WISE):
        for message, size in ((_IDS, ids), (_VALUES, vectors), (_GRADIENTS, trained)):
            bytes_.to_rank(message, layout, size)
    elif option.rule is ShardingKind.ROW_WISE:
        for message, size in ((_IDS, ids), (_VALUES, vectors * ~pooled), (_GRADIENTS, trained * ~pooled)):
            bytes_.even(message, _INTRA, size * (local - 1) / world)
            bytes_.even(message, _INTER, size * (world - local) / world)
        for message, size in ((_SCATTERED, vectors * pooled), (_GATHERED, trained * pooled)):
            bytes_.ring(message, layout, size * (world - 1))
    elif option.rule is ShardingKind.TABLE_ROW_WISE:
        of = bytes_.of
        of[:, _NODE, _IDS, _INTRA] += (ids * (local - 1) / local)[:, None]
        of[:, _EVERY, _IDS, _INTER, _SENT] += ids
        of[:, _NODE, _IDS, _INTER, _SENT] -= ids
        of[:, _NODE, _IDS, _INTER, _RECEIVED] += (world - local) / local * ids
        for scattered, rail, size, home in (
            (_SCATTERED, _VALUES, vectors, _SENT), (_GATHERED, _GRADIENTS, trained, _RECEIVED),
        ):  # fmt: skip
            of[:, _NODE, scattered, _INTRA] += (nodes * (local - 1) * size)[:, None]
            of[:, _NODE, rail, _INTER, home] += (nodes - 1) * size
            of[:, _EVERY, rail, _INTER, 1 - home] += size
            of[:, _NODE, rail, _INTER, 1 - home] -= size
    else:
        bytes_.ring(_SUMMED, layout, 2 * (world - 1) / world * work.rows * work.row_bytes * work.trained)
    kernels = np.zeros((len(work.names), len(Part), 2))
    if option.rule is ShardingKind.DATA_PARALLEL:
        kernels[:, _EVERY, 0] = accesses * work.row_bytes + vectors
        kernels[:, _EVERY, 1] = (2 * work.stored_bytes + 2 * work.rows * work.row_bytes) * work.trained
    else:
        rule = ShardingKind.TABLE_WISE if option.rule is ShardingKind.COLUMN_WISE else option.rule
        kernels = kernel_bytes(work, layout, rule, sums=True) / option.pieces
    return np.concatenate([bytes_.of.reshape(len(work.names), len(Part), -1), kernels], axis=2)
