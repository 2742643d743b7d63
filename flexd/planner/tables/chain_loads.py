"""Bytes that a table moves in flexd's exchanges, by the ranks that move them, for every home rule and answer.

Derivations are in docs/cost-model.md, "Tables". Arrays are float64[T, 4, 12]: by ``Part``, and by message (ids, values,
gradients), link (inside, between nodes) and direction (sent, received). What one side sends the other receives, so
that values travel as ids do with the directions exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout
from flexd.planner.model.row_bytes import ID_BYTES
from flexd.planner.model.workload import ACCESSES, ANYWHERE, BACK_PER_NODE, BACK_PER_RANK, PER_NODE, PER_RANK
from flexd.planner.tables.options import HomeKind, Part
from flexd.planner.tables.table_work import TableWork

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


def row_loads(work: TableWork, layout: RankLayout, rule: HomeKind) -> Float64Array:
    """Return the loads of tables that answer by rows: each distinct row once a hop."""
    nodes, local = layout.nodes, layout.local_ranks
    loads = _Bytes(np.zeros((len(work.names), len(Part), len(MESSAGES), LINKS, 2)))
    statistics = work.statistics.T
    for message, size, of_rank, of_node in (
        (_IDS, np.full(len(work.names), float(ID_BYTES)), PER_RANK, PER_NODE),
        (_VALUES, work.wire_bytes, PER_RANK, PER_NODE),
        (_GRADIENTS, work.wire_bytes, BACK_PER_RANK, BACK_PER_NODE),
    ):
        rank, node = statistics[of_rank] * size, statistics[of_node] * size
        if rule is HomeKind.RANK:
            # The rank of a node that has the home's local rank stands between.
            loads.to(message, _INTRA, (_EVERY, _RAIL), local - 1, rank)
            loads.to(message, _INTER, (_RAIL, _RANK), nodes - 1, node)
            continue
        loads.even(message, _INTRA, rank * (local - 1) / local)
        if rule is HomeKind.NODE:
            loads.to(message, _INTER, (_EVERY, _NODE), nodes - 1, node / local)
        else:
            loads.even(message, _INTER, node * (nodes - 1) / (nodes * local))
    return loads.of.reshape(len(work.names), len(Part), -1)


def sum_loads(work: TableWork, layout: RankLayout, rule: HomeKind) -> Float64Array:
    """Return the loads of tables that answer by sums: every id of a bag, and one vector a bag and place."""
    nodes, local, world = layout.nodes, layout.local_ranks, layout.world_size
    loads = _Bytes(np.zeros((len(work.names), len(Part), len(MESSAGES), LINKS, 2)))
    accesses, length = work.statistics[:, ACCESSES], work.bag_length
    for message in (_IDS, _VALUES, _GRADIENTS):
        vector = work.bags * work.wire_bytes * (work.trained if message == _GRADIENTS else 1.0)

        def size(places: int, of: int = message, vector: Float64Array = vector) -> Float64Array:
            """Bytes of a rank's bags whose ids are among so many places."""
            return accesses * work.id_bytes if of == _IDS else vector * parts_of_bags(length, places)

        if rule is HomeKind.ALL:
            loads.even(message, _INTER, size(nodes) * (nodes - 1) / nodes)
            loads.even(message, _INTRA, size(world) * (local - 1) / local)
            continue
        loads.to(message, _INTER, (_EVERY, _NODE), nodes - 1, size(1))
        if rule is HomeKind.RANK:
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


def kernel_bytes(work: TableWork, layout: RankLayout, rule: HomeKind, *, sums: bool) -> Float64Array:
    """Return float64[T, 4, 2]: bytes that look-up and update read and write in a rank's memory."""
    nodes, world = layout.nodes, layout.world_size
    loads = np.zeros((len(work.names), len(Part), 2))
    statistics, size = work.statistics.T, work.row_bytes
    part, ranks = {
        HomeKind.ALL: (_EVERY, world), HomeKind.NODE: (_NODE, layout.local_ranks), HomeKind.RANK: (_RANK, 1),
        HomeKind.COPIES: (_EVERY, 1),
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
    if rule is HomeKind.COPIES:
        loads[:, _EVERY, 0] += statistics[PER_RANK] * size
        loads[:, _EVERY, 1] += stored
        return loads
    station, share = (_RAIL, layout.local_ranks) if rule is HomeKind.RANK else (_EVERY, 1)
    loads[:, station, 0] += statistics[PER_RANK] * size * share
    loads[:, station, 1] += statistics[BACK_PER_RANK] * size * share
    loads[:, part, 0] += nodes * statistics[PER_NODE] * size / ranks
    loads[:, part, 1] += (nodes * statistics[BACK_PER_NODE] * size + stored) / ranks
    return loads
