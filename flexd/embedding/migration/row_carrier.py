"""Promoted rows as columns of the fetch of a step: from their homes over the rail, then inside the node."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexd.embedding.exchange.collectives import TrafficKind
from flexd.embedding.exchange.column import Column, ReceivedRows
from flexd.embedding.exchange.hop import Hop
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.store.slow.tier import RowColumn
from flexd.embedding.store.store import GroupStore

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
        rows.copy_to(column, slots)
    else:
        column.index_copy_(0, slots, rows.whole(column.dtype))


class RowCarrier:
    """Carries the values and state of promoted rows in the messages of a fetch, in the dtypes of the stores.

    A fetch takes the rail before the node, so a node owner has the rows before it sends them on; and it reads the rows
    that are held at a station after the messages of that station's hop, so a look-up finds the rows of a chunk from the
    pass that carries them on. Both ends of a message know its rows from the chunk: no size is exchanged.

    Args:
        over_rail, in_node: slots of the rows on this rank.
    """

    def __init__(
        self, groups: ChainGroups, stores: Sequence[GroupStore], over_rail: SlotsByPeer, in_node: SlotsByPeer
    ) -> None:
        self._groups = groups
        self._stores = list(stores)
        self.over_rail, self.in_node = over_rail, in_node

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

    def _kept(self, hop: Hop) -> list[tuple[RowColumn, tuple[torch.Tensor, ...]]]:
        """Return values and state of the dim-groups of which any peer sends rows: the same on every peer."""
        slots = self.over_rail if hop.peers is self._groups.rail else self.in_node
        return [
            (column, of_peers)
            for store, of_peers in zip(self._stores, slots, strict=True)
            if any(map(len, of_peers))
            for column in (store.rows, store.state)
            if column.shape[1]
        ]
