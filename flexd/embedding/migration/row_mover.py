"""Moves rows with optimizer state over a rail, between their homes and the nodes in which they live."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from flexd.core.layout import is_moved, nodes_of_moved
from flexd.embedding.exchange.column import Column
from flexd.embedding.exchange.hop import Hop
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.migration.row_carrier import store_rows, stored_rows
from flexd.embedding.store.slow.tier import RowColumn
from flexd.embedding.store.store import GroupStore

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
ChangesHomeRows = Callable[[Sequence[tuple[int, torch.Tensor]]], None]
"""Called with (dim-group, int64 [n] home slots) of this rank."""


class RowMover:
    """Copies moved rows one way or the other, in one collective over the rail for all dim-groups.

    Both ends of a message know its rows, since all ranks list the same moved rows: no size is exchanged.

    Args:
        buffer_bytes: limit on the rows and state of one collective; at least a row travels.
        changes_home_rows: called with the home slots that were written.
    """

    def __init__(
        self,
        groups: ChainGroups,
        stores: Sequence[GroupStore],
        buffer_bytes: int,
        changes_home_rows: ChangesHomeRows | None,
    ) -> None:
        self._layout = groups.layout
        self._rail = Hop(groups.rail, lambda homes: homes // groups.layout.local_ranks)
        self._node = groups.layout.node_of(groups.rank)
        self._local = groups.layout.local_rank_of(groups.rank)
        self._stores = list(stores)
        self._buffer_bytes = buffer_bytes
        self._changes_home_rows = changes_home_rows

    def bring_home(self, addresses: Int64Array, slots: Int32Array, tiers: UInt8Array) -> None:
        """Collective over the rail. Copy the moved rows among these to their home slots.

        Args:
            addresses: int64 [n], ascending, equal on all ranks of the rail but for rows of other rails.
            slots: int32 [n], of the rows that live on this rank.
            tiers: uint8 [n].
        """
        self._move(addresses, slots, tiers, home=True)

    def send_away(self, addresses: Int64Array, slots: Int32Array, tiers: UInt8Array) -> None:
        """Collective over the rail. Copy the moved rows among these from their home slots to where they live.

        Args: as ``bring_home``.
        """
        self._move(addresses, slots, tiers, home=False)

    def _move(self, addresses: Int64Array, slots: Int32Array, tiers: UInt8Array, *, home: bool) -> None:
        mine = is_moved(tiers) & (addresses % self._layout.local_ranks == self._local)
        addresses, nodes = addresses[mine], nodes_of_moved(tiers[mine])
        places: Int64Array = slots[mine].astype(np.int64)
        most = max(1, self._buffer_bytes // max(store.row_bytes for store in self._stores))
        for first in range(0, len(addresses), most):
            block = slice(first, first + most)
            self._move_block(addresses[block], places[block], nodes[block], home=home)

    def _move_block(self, addresses: Int64Array, slots: Int64Array, nodes: Int64Array, *, home: bool) -> None:
        columns: list[Column] = []
        targets: list[tuple[RowColumn, torch.Tensor]] = []
        written: list[tuple[int, torch.Tensor]] = []
        for number, store in enumerate(self._stores):
            group = (addresses >= store.group.first_key) & (addresses < store.group.end_key)
            if not group.any():
                continue  # on all ranks of the rail
            of_homes = self._layout.home_node(addresses[group])
            at_home = (addresses[group] - store.first_home_address) // store.world_size
            ends = (nodes[group], slots[group]), (of_homes, at_home)
            (sender, from_slots), (receiver, to_slots) = ends if home else ends[::-1]
            sent, send_counts = self._ordered(from_slots, receiver, sender == self._node)
            received, receive_counts = self._ordered(to_slots, sender, receiver == self._node)
            if home:
                written.append((number, received))
            for column in (store.rows, store.state):
                if column.shape[1]:
                    columns.append(stored_rows(column, sent, send_counts, receive_counts))
                    targets.append((column, received))
        for (column, to), arrived in zip(targets, self._rail.exchange(columns), strict=True):
            store_rows(column, to, arrived)
        if written and self._changes_home_rows is not None:
            self._changes_home_rows(written)

    def _ordered(
        self, slots: Int64Array, peer: Int64Array, here: npt.NDArray[np.bool_]
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the slots of the rows that are ``here``, by the node at the other end, and how many each node has."""
        slots, peer = slots[here], peer[here]
        ordered = torch.from_numpy(slots[np.argsort(peer, kind="stable")]).to(self._stores[0].rows.device)
        counts: list[int] = np.bincount(peer, minlength=self._layout.nodes).tolist()
        return ordered, counts
