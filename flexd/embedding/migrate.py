"""Applies chunks: copies promoted rows from their homes, recycles the slots of demoted ones, flips the directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from flexd.embedding.groups import ChainGroups, Peers
from flexd.embedding.store import GroupStore
from flexd.embedding.traffic import Kind, Traffic
from flexd.errors import PlacementError
from flexd.layout import Tier
from flexd.placement import Delta

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Moves:
    """The rows of one dim-group that change: int64 [n] ``keys`` (ascending), uint8 [n] tiers before and after."""

    store: GroupStore
    keys: Int64Array
    old: UInt8Array
    new: UInt8Array


class Migrator:
    """Collective: every rank applies the same chunks at the same step (``ChunkInbox`` sees to that).

    Args:
        buffer_bytes: rows and state that are copied at once, at most: more are copied block by block, so that the
            buffers do not grow with the chunk. Of one row at least.
    """

    def __init__(self, groups: ChainGroups, stores: Sequence[GroupStore], traffic: Traffic, buffer_bytes: int) -> None:
        self._groups = groups
        self._layout = groups.layout
        self._stores = list(stores)
        self._traffic = traffic
        self._buffer_bytes = buffer_bytes
        self._local = groups.layout.local_rank_of(groups.rank)
        self.digest = 0
        """``Placement.digest`` of what is applied."""
        self.most_rows = 0
        """Of the chunks of one step, so far."""

    def copied_bytes(self, delta: Delta) -> int:
        """Row and state bytes that the busiest link copies for a chunk; equal on every rank."""
        return int(self._bytes_by_row(delta).sum())

    def starts_here(self, keys: Int64Array, old: UInt8Array) -> BoolArray:
        """bool [n], any thread: can these rows be at these tiers, by what is applied and this rank knows of? It does
        not know of the NODE rows of other rails."""
        right = np.ones(len(keys), dtype=np.bool_)
        for store in self._stores:
            mine = self._of(store, keys)
            right[mine] = self._listing(store, keys[mine], old[mine])[0]
        return right

    def apply(self, chunks: Sequence[Delta]) -> None:
        """Makes the placement that follows the chunks, as if they were one: a row is copied at most once, and one
        all-gather a hop of the chain serves all chunks and dim-groups. Demotions free their slots before promotions
        take them.

        Raises:
            PlacementError: a chunk does not start from what this rank has. Applying it would hand the slots of other
                rows out twice; nothing has been changed.
        """
        delta = Delta.joined(chunks)
        self.most_rows = max(self.most_rows, len(delta))
        moves = self._by_group(delta)
        listed = [self._listed_positions(part) for part in moves]
        for part, removed in zip(moves, listed, strict=True):
            self._flip(part, removed)
        self._copy(delta)
        self.digest = (self.digest + delta.digest_change()) % 2**64

    def refresh(self) -> None:
        """Collective: copies every replica anew from its home, after the home rows were loaded."""
        for store in self._stores:
            keys = store.directory.keys.cpu().numpy()
            for tier in (Tier.NODE, Tier.DEVICE):
                # One tier at a time: all ranks of a collective list the same rows of it, so their blocks are the same.
                at = keys[store.directory.at_tier(tier).cpu().numpy()]
                self._copy(Delta(at, np.zeros(len(at), np.uint8), np.full(len(at), tier, np.uint8)))

    def placement(self) -> tuple[Int64Array, UInt8Array]:
        """This rank's part of the placement: (int64 keys, ascending, and uint8 tiers) of its rail's NODE rows and all
        DEVICE rows."""
        directories = [store.directory for store in self._stores]
        keys = np.concatenate([d.keys.cpu().numpy() for d in directories])
        order = np.argsort(keys)
        return keys[order], np.concatenate([d.tiers.cpu().numpy() for d in directories])[order]

    @staticmethod
    def _of(store: GroupStore, keys: Int64Array) -> BoolArray:
        inside: BoolArray = (keys >= store.group.first_key) & (keys < store.group.end_key)
        return inside

    def _by_group(self, delta: Delta) -> list[_Moves]:
        moves = []
        for store in self._stores:
            mine = self._of(store, delta.keys)
            moves.append(_Moves(store, delta.keys[mine], delta.old_tiers[mine], delta.new_tiers[mine]))
        return moves

    def _bytes_by_row(self, delta: Delta) -> Int64Array:
        """int64 [n]: of rows and state that travel; equal on every rank."""
        cost = np.zeros(len(delta), dtype=np.int64)
        promoted = delta.new_tiers > delta.old_tiers
        for store in self._stores:
            cost[promoted & self._of(store, delta.keys)] = store.row_bytes
        return cost

    def _listed(self, keys: Int64Array, tiers: UInt8Array) -> BoolArray:
        """Rows that this rank's directory lists: with one node, NODE is what HOME is."""
        on_rail = (tiers == Tier.NODE) & (keys % self._layout.local_ranks == self._local) & (self._layout.nodes > 1)
        listed: BoolArray = on_rail | ((tiers == Tier.DEVICE) & (self._layout.world_size > 1))
        return listed

    def _listing(self, store: GroupStore, keys: Int64Array, old: UInt8Array) -> tuple[BoolArray, torch.Tensor]:
        """(bool [n]: is the row where ``old`` says? int64 positions of the rows that ``old`` says are listed here)."""
        directory = store.directory
        was = self._listed(keys, old)
        at, found = directory.find(torch.from_numpy(keys).to(store.rows.device))
        right = found.cpu().numpy() == was
        listed = at[torch.from_numpy(was).to(at.device)]
        if len(directory):
            right[was] &= directory.tiers_at(listed).cpu().numpy() == old[was]
        return right, listed

    def _listed_positions(self, moves: _Moves) -> torch.Tensor:
        """int64 directory positions of the rows listed here before."""
        right, listed = self._listing(moves.store, moves.keys, moves.old)
        if not bool(right.all()):
            raise PlacementError(
                f"rank {moves.store.rank}: {int((~right).sum())} rows of a chunk of {len(right)} are not at the tier "
                f"it says, key {int(moves.keys[~right][0])} for one",
                remedy="a fault of the daemon: please report it with the daemon's journal",
            )
        return listed

    def _flip(self, moves: _Moves, removed: torch.Tensor) -> None:
        """Slots change hands and the directory lists what is to be; the new replicas hold nothing yet."""
        store, keys, old, new = moves.store, moves.keys, moves.old, moves.new
        if len(keys) == 0:
            return
        device, rank = store.rows.device, self._groups.rank
        was, stays = self._listed(keys, old), self._listed(keys, new)
        had_replica = self._layout.holds_replica(rank, keys, old)
        has_replica = self._layout.holds_replica(rank, keys, new)
        slots = np.full(len(keys), -1, dtype=np.int32)
        slots[was] = store.directory.slots_at(removed).cpu().numpy()
        store.give_slots(slots[had_replica & ~has_replica])
        fresh = has_replica & ~had_replica
        slots[fresh] = store.take_slots(int(fresh.sum()))
        at_home = self._layout.home_rank(keys) == rank
        slots[at_home] = (keys[at_home] - store.first_home_key) // store.world_size
        store.directory = store.directory.replace(
            removed,
            torch.from_numpy(keys[stays]).to(device),
            torch.from_numpy(slots[stays]).to(device),
            torch.from_numpy(new[stays]).to(device),
        )

    def _copy(self, delta: Delta) -> None:
        """Copies the promoted rows of a delta (ascending by key), in as many blocks as the buffer asks for."""
        travels = self._bytes_by_row(delta)
        before = np.cumsum(travels) - travels
        widest = max((store.row_bytes for store in self._stores), default=1)
        room = max(widest, self._buffer_bytes - widest + 1)
        bounds = np.searchsorted(before, np.arange(0, int(travels.sum()), room), side="left")
        for start, end in pairwise([*np.unique(bounds).tolist(), len(delta)]):
            self._copy_block(delta.take(slice(start, end)))

    def _copy_block(self, block: Delta) -> None:
        """Promoted rows travel the chain downwards: home to the node owners over the rail, then inside the node."""
        layout = self._layout
        over_rail, in_node = [], []
        for part in self._by_group(block):
            keys = part.keys
            promoted = (part.old == Tier.HOME) & (part.new != Tier.HOME)
            rail_keys = keys[promoted & (keys % layout.local_ranks == self._local)]
            over_rail.append((part.store, rail_keys, layout.home_node(rail_keys)))
            node_keys = keys[(part.old != Tier.DEVICE) & (part.new == Tier.DEVICE)]
            in_node.append((part.store, node_keys, node_keys % layout.local_ranks))
        with self._traffic.kind(Kind.MIGRATION):
            _spread(self._groups.rail, over_rail)
            _spread(self._groups.node, in_node)


def _spread(peers: Peers, parts: Sequence[tuple[GroupStore, Int64Array, Int64Array]]) -> None:
    """Collective over ``peers``: every member gets the rows that others have, in one all-gather for all dim-groups.

    A member's part of the buffer has a section for the values and one for the state of each dim-group, as long as the
    member with most rows needs it. All know who sends what, so nothing but rows travels, and rows are copied straight
    between the stores and the buffer.

    Args:
        parts: per dim-group (store, int64 [n] keys, int64 [n] index of the peer that has each).
    """
    counts = [np.bincount(owner, minlength=peers.size) for _, _, owner in parts]
    if peers.size == 1 or not any(len(keys) for _, keys, _ in parts):
        return
    sections: list[_Section] = []
    end = 0
    for (store, _, _), count in zip(parts, counts, strict=True):
        for column in (store.rows, store.state):
            sections.append(_Section(column, end))
            end += -(-int(count.max()) * column.shape[1] * column.element_size() // _ALIGNMENT) * _ALIGNMENT
    mine = torch.zeros(end, dtype=torch.uint8, device=parts[0][0].rows.device)
    slots: list[tuple[torch.Tensor, ...]] = []
    for (store, keys, owner), count in zip(parts, counts, strict=True):
        ordered = torch.from_numpy(keys[np.argsort(owner, kind="stable")]).to(mine.device)
        slots.append(torch.split(store.locate(ordered)[1], count.tolist()))
    for section, of_peers in zip(sections, _twice(slots), strict=True):
        held = of_peers[peers.index]
        if section.column.shape[1] and len(held):
            torch.index_select(section.column, 0, held, out=section.rows(mine, len(held)))
    gathered = peers.all_gather(mine)
    for section, of_peers in zip(sections, _twice(slots), strict=True):
        for peer, here in enumerate(of_peers):
            if peer != peers.index and section.column.shape[1] and len(here):
                section.column.index_copy_(0, here, section.rows(gathered[peer], len(here)))


_ALIGNMENT = 16
"""Bytes: a section may be viewed as numbers of any width."""


@dataclass(frozen=True)
class _Section:
    """Where the rows of ``column`` [slots, width] begin in a member's part of a buffer, in bytes."""

    column: torch.Tensor
    start: int

    def rows(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """[count, width], a view of uint8 ``part``."""
        width = self.column.shape[1]
        end = self.start + count * width * self.column.element_size()
        return part[self.start : end].view(self.column.dtype).view(count, width)


def _twice(slots: Sequence[tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
    """For the two sections of each dim-group."""
    return [of_peers for of_peers in slots for _ in range(2)]
