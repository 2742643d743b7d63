"""Applies chunks: copies promoted rows from their homes, recycles the slots of demoted ones, flips the directory."""

from __future__ import annotations

from collections.abc import Sequence

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


class Migrator:
    """Collective: every rank applies the same chunks at the same step (``ChunkInbox`` sees to that)."""

    def __init__(self, groups: ChainGroups, stores: Sequence[GroupStore], traffic: Traffic) -> None:
        self._groups = groups
        self._layout = groups.layout
        self._stores = list(stores)
        self._traffic = traffic
        self._local = groups.layout.local_rank_of(groups.rank)
        self.digest = 0
        """``Placement.digest`` of what is applied."""

    def copied_bytes(self, delta: Delta) -> int:
        """Row and state bytes that the busiest link copies for a chunk; equal on every rank."""
        promoted = delta.new_tiers > delta.old_tiers
        return sum(int(promoted[self._of(store, delta.keys)].sum()) * store.row_bytes for store in self._stores)

    def apply(self, delta: Delta) -> None:
        """Makes the placement that follows the chunk. Demotions free their slots before promotions take them."""
        for store in self._stores:
            mine = self._of(store, delta.keys)
            self._apply_group(store, delta.keys[mine], delta.old_tiers[mine], delta.new_tiers[mine])
        self.digest = (self.digest + delta.digest_change()) % 2**64

    def refresh(self) -> None:
        """Collective: copies every replica anew from its home, after the home rows were loaded."""
        for store in self._stores:
            keys = store.directory.keys.cpu().numpy()
            tiers = store.directory.tiers.cpu().numpy()
            self._copy(store, keys, np.zeros_like(tiers), tiers)

    def placement(self) -> tuple[Int64Array, UInt8Array]:
        """This rank's part of the placement: (int64 keys, uint8 tiers) of its rail's NODE rows and all DEVICE rows."""
        directories = [store.directory for store in self._stores]
        return (
            np.concatenate([d.keys.cpu().numpy() for d in directories]),
            np.concatenate([d.tiers.cpu().numpy() for d in directories]),
        )

    @staticmethod
    def _of(store: GroupStore, keys: Int64Array) -> npt.NDArray[np.bool_]:
        inside: npt.NDArray[np.bool_] = (keys >= store.group.first_key) & (keys < store.group.end_key)
        return inside

    def _listed(self, keys: Int64Array, tiers: UInt8Array) -> npt.NDArray[np.bool_]:
        """Rows that this rank's directory lists: with one node, NODE is what HOME is."""
        on_rail = (tiers == Tier.NODE) & (keys % self._layout.local_ranks == self._local) & (self._layout.nodes > 1)
        listed: npt.NDArray[np.bool_] = on_rail | ((tiers == Tier.DEVICE) & (self._layout.world_size > 1))
        return listed

    def _apply_group(self, store: GroupStore, keys: Int64Array, old: UInt8Array, new: UInt8Array) -> None:
        device = store.rows.device
        rank = self._groups.rank
        order = np.argsort(keys, kind="stable")
        keys, old, new = keys[order], old[order], new[order]

        was, stays = self._listed(keys, old), self._listed(keys, new)
        had_replica = self._layout.holds_replica(rank, keys, old)
        has_replica = self._layout.holds_replica(rank, keys, new)
        removed = self._check_old_tiers(store, keys, old, was)
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
        self._copy(store, keys, old, new)

    @staticmethod
    def _check_old_tiers(
        store: GroupStore, keys: Int64Array, old: UInt8Array, was: npt.NDArray[np.bool_]
    ) -> torch.Tensor:
        """int64 directory positions of the rows that the chunk takes to be listed here.

        Raises:
            PlacementError: the chunk does not start from what this rank has. Applying it would hand the slots of other
                rows out twice; no row has been changed yet.
        """
        at, found = store.directory.find(torch.from_numpy(keys).to(store.rows.device))
        right = found.cpu().numpy() == was
        removed = at[torch.from_numpy(was).to(at.device)]
        if bool(right.all()):
            right[was] = store.directory.tiers_at(removed).cpu().numpy() == old[was]
        if not bool(right.all()):
            raise PlacementError(
                f"rank {store.rank}: {int((~right).sum())} rows of a chunk of {len(keys)} are not at the tier it says, "
                f"key {int(keys[~right][0])} for one",
                remedy="a fault of the daemon: please report it with the daemon's journal",
            )
        return removed

    def _copy(self, store: GroupStore, keys: Int64Array, old: UInt8Array, new: UInt8Array) -> None:
        """Promoted rows travel the chain downwards: home to the node owners over the rail, then inside the node."""
        layout = self._layout
        with self._traffic.kind(Kind.MIGRATION):
            over_rail = (old == Tier.HOME) & (new != Tier.HOME) & (keys % layout.local_ranks == self._local)
            self._spread(store, self._groups.rail, keys[over_rail], layout.home_node(keys[over_rail]))
            in_node = (old != Tier.DEVICE) & (new == Tier.DEVICE)
            self._spread(store, self._groups.node, keys[in_node], keys[in_node] % layout.local_ranks)

    @staticmethod
    def _spread(store: GroupStore, peers: Peers, keys: Int64Array, owner: Int64Array) -> None:
        """Every member gets the rows that the peer with index ``owner`` has. All know who sends what."""
        if peers.size == 1 or len(keys) == 0:
            return
        device = store.rows.device
        counts = np.bincount(owner, minlength=peers.size)
        longest = int(counts.max())
        order = np.argsort(owner, kind="stable")
        _, slots, _ = store.locate(torch.from_numpy(keys[order]).to(device))
        first = int(counts[: peers.index].sum())
        mine = store.pack(slots[first : first + int(counts[peers.index])])
        part = mine.new_zeros((longest, store.row_bytes))
        part[: len(mine)] = mine
        gathered = peers.all_gather(part)
        present = torch.from_numpy(np.arange(longest) < counts[:, None]).to(device)
        elsewhere = torch.from_numpy(owner[order] != peers.index).to(device)
        store.unpack(gathered[present][elsewhere], slots[elsewhere])
