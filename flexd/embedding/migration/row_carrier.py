"""Rows that change their place: as columns of the fetch of a step, copied to replicas, moved between nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from flexd.core.arrays import BoolArray, Int32Array, Int64Array, UInt8Array
from flexd.core.placement import is_rehomed, nodes_of_rehomed
from flexd.embedding.exchange.collectives import TrafficKind
from flexd.embedding.exchange.column import Column, ReceivedRows, copy_columns
from flexd.embedding.exchange.hop import Hop
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.store.store import GroupStore

if TYPE_CHECKING:
    from flexd.embedding.store.slow.tiered_rows import RowColumn

SlotsByPeer = list[tuple[torch.Tensor, ...]]
"""Per dim-group and peer of a hop: int64 slots of the rows that the peer sends to the others."""


def stored_rows(
    column: RowColumn, slots: torch.Tensor, sent: Sequence[int], received: Sequence[int], repeats: int = 1
) -> Column:
    """Return the column that sends rows of a store's values or state as they are stored.

    Args:
        slots: int64 [n] of the rows, peer after peer; each of ``repeats`` peers gets all of them.
    """
    if isinstance(column, torch.Tensor):
        source, index = column, slots
    else:
        source = column.index_select(0, slots)
        index = torch.arange(len(slots), device=slots.device)
    return Column(source, index.repeat(repeats), sent, received, source.dtype, TrafficKind.MIGRATION)


def store_rows(column: RowColumn, slots: torch.Tensor, rows: ReceivedRows) -> None:
    """Write the received rows of such a column to int64 [n] ``slots``, peer after peer."""
    if not len(slots):
        return
    if isinstance(column, torch.Tensor):
        copy_columns([rows], [column], [slots])
    else:
        column.index_copy_(0, slots, rows.whole(column.dtype))


@dataclass(frozen=True, eq=False)
class RowCarrier:
    """Carries the values and state of promoted rows in the messages of a fetch, in the dtypes of the stores.

    A fetch takes the rail before the node, so a node owner has the rows before it sends them on; and it reads the rows
    that are held at a station after the messages of that station's hop, so a look-up finds the rows of a chunk from the
    pass that carries them on. Both ends of a message know its rows from the chunk: no size is exchanged.

    Attributes:
        over_rail, in_node: slots of the rows on this rank.
    """

    groups: ChainGroups
    stores: Sequence[GroupStore]
    over_rail: SlotsByPeer
    in_node: SlotsByPeer

    def columns(self, hop: Hop) -> list[Column]:
        """Return the columns of a hop; none if no peer sends any row over it."""
        me, size = hop.peers.index, hop.peers.size
        columns = []
        for column, of_peers in self._kept(hop):
            here = of_peers[me]
            sent = [0 if peer == me else len(here) for peer in range(size)]
            received = [0 if peer == me else len(slots) for peer, slots in enumerate(of_peers)]
            columns.append(stored_rows(column, here, sent, received, repeats=size - 1))
        return columns

    def receive(self, hop: Hop, arrived: Sequence[ReceivedRows]) -> None:
        """Write the received rows of the columns of a hop to their slots."""
        me = hop.peers.index
        for (column, of_peers), rows in zip(self._kept(hop), arrived, strict=True):
            store_rows(column, torch.cat([*of_peers[:me], *of_peers[me + 1 :]]), rows)

    def carry(self) -> None:
        """Collective. Exchange the rows in messages of their own."""
        for peers in (self.groups.rail, self.groups.node):
            hop = Hop(peers, lambda homes: homes)
            if peers.size > 1 and (columns := self.columns(hop)):
                self.receive(hop, hop.exchange(columns))

    def _kept(self, hop: Hop) -> list[tuple[RowColumn, tuple[torch.Tensor, ...]]]:
        """Return values and state of the dim-groups of which any peer sends rows: the same on every peer."""
        slots = self.over_rail if hop.peers is self.groups.rail else self.in_node
        return [
            (column, of_peers)
            for store, of_peers in zip(self.stores, slots, strict=True)
            if any(map(len, of_peers))
            for column in (store.rows, store.state)
            if column.shape[1]
        ]


ChangesHomeRows = Callable[[Sequence[tuple[int, torch.Tensor]]], None]
"""Called with (dim-group, int64 [n] home slots) of this rank."""


@dataclass(frozen=True, eq=False)
class RowMover:
    """Copies re-homed rows one way or the other, in one collective over the rail for all dim-groups.

    Both ends of a message know its rows, since all ranks list the same re-homed rows: no size is exchanged.

    Attributes:
        buffer_bytes: limit on the rows and state of one collective; at least a row travels.
        changes_home_rows: called with the home slots that were written.
    """

    groups: ChainGroups
    stores: Sequence[GroupStore]
    buffer_bytes: int
    changes_home_rows: ChangesHomeRows | None

    def move(self, addresses: Int64Array, slots: Int32Array, tiers: UInt8Array, *, home: bool) -> None:
        """Collective over the rail. Copy the re-homed rows among these to their home slots, or from these to where they
        live.

        Args:
            addresses: int64 [n], ascending, equal on all ranks of the rail but for rows of other rails.
            slots: int32 [n], of the rows that live on this rank.
            tiers: uint8 [n].
        """
        layout = self.groups.layout
        mine = is_rehomed(tiers) & (addresses % layout.local_ranks == layout.local_rank_of(self.groups.rank))
        addresses, nodes = addresses[mine], nodes_of_rehomed(tiers[mine])
        places: Int64Array = slots[mine].astype(np.int64)
        most = max(1, self.buffer_bytes // max(store.row_bytes for store in self.stores))
        for first in range(0, len(addresses), most):
            block = slice(first, first + most)
            self._move_block(addresses[block], places[block], nodes[block], home=home)

    def _move_block(self, addresses: Int64Array, slots: Int64Array, nodes: Int64Array, *, home: bool) -> None:
        layout = self.groups.layout
        columns: list[Column] = []
        targets: list[tuple[RowColumn, torch.Tensor]] = []
        written: list[tuple[int, torch.Tensor]] = []
        for number, store in enumerate(self.stores):
            group = (addresses >= store.group.first_key) & (addresses < store.group.end_key)
            if not group.any():
                continue  # on all ranks of the rail
            of_homes = layout.home_node(addresses[group])
            at_home = (addresses[group] - store.first_home_address) // store.world_size
            ends = (nodes[group], slots[group]), (of_homes, at_home)
            (sender, from_slots), (receiver, to_slots) = ends if home else ends[::-1]
            node = layout.node_of(self.groups.rank)
            sent, send_counts = self._ordered(from_slots, receiver, sender == node)
            received, receive_counts = self._ordered(to_slots, sender, receiver == node)
            if home:
                written.append((number, received))
            for column in (store.rows, store.state):
                if column.shape[1]:
                    columns.append(stored_rows(column, sent, send_counts, receive_counts))
                    targets.append((column, received))
        rail = Hop(self.groups.rail, lambda homes: homes // layout.local_ranks)
        for (column, to), arrived in zip(targets, rail.exchange(columns), strict=True):
            store_rows(column, to, arrived)
        if written and self.changes_home_rows is not None:
            self.changes_home_rows(written)

    def _ordered(self, slots: Int64Array, peer: Int64Array, here: BoolArray) -> tuple[torch.Tensor, list[int]]:
        """Return the slots of the rows that are ``here``, by the node at the other end, and how many each node has."""
        slots, peer = slots[here], peer[here]
        ordered = torch.from_numpy(slots[np.argsort(peer, kind="stable")]).to(self.stores[0].rows.device)
        return ordered, np.bincount(peer, minlength=self.groups.layout.nodes).tolist()
