"""Moves blocks of home rows with optimizer state to the ranks of another home rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from flexd.core.home_block import HomeBlock
from flexd.core.home_changes import after_block
from flexd.core.homes import Homes
from flexd.embedding.exchange.column import ReceivedRows
from flexd.embedding.exchange.hop import Hop
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.migration.row_carrier import store_rows, stored_rows
from flexd.embedding.migration.row_mover import ChangesHomeRows
from flexd.embedding.store.slow.two_memories import first_home_slots
from flexd.embedding.store.store import GroupStore

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockMove:
    """Rows that travel in one collective.

    Attributes:
        homes: the map after it.
        group: dim-group of the rows.
        sent: int64 [n] home slots of this rank, ordered by the rank that receives them.
        send_counts: rows for each rank.
        received: int64 [m] home slots of this rank, ordered by the rank that sends them.
        receive_counts: rows of each rank.
    """

    homes: Homes
    group: int
    sent: torch.Tensor
    send_counts: list[int]
    received: torch.Tensor
    receive_counts: list[int]

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (self.sent, self.received)


class BlockMover:
    """Moves blocks from rank to rank, in one collective over all ranks for as many rows as the buffer holds.

    Both ends of a message know its rows from the block: no size is exchanged.

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
        self._hop = Hop(groups.world, lambda homes: homes)
        self._world_size, self._rank = groups.layout.world_size, groups.rank
        self._stores = list(stores)
        self._buffer_bytes = buffer_bytes
        self._changes_home_rows = changes_home_rows

    def prepare(self, homes: Homes, block: HomeBlock) -> list[BlockMove]:
        """Return the moves of a block, one after another. Any thread.

        Args:
            homes: the map before it.

        Raises:
            PlacementError, TopologyError: as ``after_block``.
        """
        store = self._stores[homes.group_of(block.table)]
        moves = []
        for part in block.divided(self._buffer_bytes // store.row_bytes):
            after = after_block(homes, part)
            moves.append(self._move_of(homes, after, part))
            homes = after
        return moves

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Collective. Move the rows, and use the map after them in place of the one before."""
        for move in moves:
            store = self._stores[move.group]
            held = [column for column in (store.rows, store.state) if column.shape[1]]
            columns = [stored_rows(column, move.sent, move.send_counts, move.receive_counts) for column in held]
            # Slow rows that were never written are made from the keys of their slots: the rows to send by the map
            # before, and those around what is written by the map after.
            arrived = self._hop.exchange(columns)
            self._use(move.homes)
            self._store(store, move.received, arrived)
            if self._changes_home_rows is not None:
                self._changes_home_rows([(move.group, move.received)])

    def _move_of(self, homes: Homes, after: Homes, block: HomeBlock) -> BlockMove:
        group = homes.group_of(block.table)
        store, world = self._stores[group], self._world_size
        keys = int(homes.keyspace.first_key[block.table]) + np.arange(block.first_row, block.end_row, dtype=np.int64)
        old, new = homes.addresses(keys), after.addresses(keys)
        sender, receiver = old % world, new % world
        sent, send_counts = self._ordered(store, old, receiver, sender == self._rank)
        received, receive_counts = self._ordered(store, new, sender, receiver == self._rank)
        return BlockMove(after, group, sent, send_counts, received, receive_counts)

    def _ordered(
        self, store: GroupStore, addresses: Int64Array, peer: Int64Array, here: npt.NDArray[np.bool_]
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the slots of the rows that are ``here``, by the rank at the other end, and how many each rank has."""
        slots, peer = (addresses[here] - store.first_home_address) // store.world_size, peer[here]
        ordered = torch.from_numpy(slots[np.argsort(peer, kind="stable")]).to(store.rows.device)
        counts: list[int] = np.bincount(peer, minlength=self._world_size).tolist()
        return ordered, counts

    def _use(self, homes: Homes) -> None:
        of_device = self._stores[0].homes
        assert of_device is not None  # noqa: S101
        of_device.change(homes)
        for store in self._stores:
            if store.tier is not None:
                store.tier.counts.change_tables(*first_home_slots(store, homes))

    def _store(self, store: GroupStore, slots: torch.Tensor, arrived: Sequence[ReceivedRows]) -> None:
        held = [column for column in (store.rows, store.state) if column.shape[1]]
        if store.tier is None:
            for column, rows in zip(held, arrived, strict=True):
                store_rows(column, slots, rows)
        elif len(slots):  # past the frames: rows that are not in use displace none that are
            packed = [
                rows.whole(column.dtype).contiguous().view(torch.uint8)
                for column, rows in zip(held, arrived, strict=True)
            ]
            store.tier.write_through(slots, torch.cat(packed, dim=1))
