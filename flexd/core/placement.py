"""Ranks and nodes, tiers of rows, and placement: the map from rows to tiers, with the deltas that change it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

import numpy as np

from flexd.core.arrays import BoolArray, Int64Array, UInt8Array, UInt64Array, first_of_run, matches
from flexd.core.errors import PlacementError, TopologyError

# ``REHOMED + n`` in place of a tier: the row's one copy is in node n, on the node owner of its rail there, and not in
# the node of its home rank.
REHOMED = 3
# Nodes that such numbers have room for in a byte.
MAX_REHOMED_NODES = 256 - REHOMED


class Tier(IntEnum):
    """Tier of a row, which states where its copies live. Chunks contain the value."""

    # One copy, on the home rank.
    HOME = 0
    # One copy in every node, on the node owner.
    NODE = 1
    # A copy on every rank.
    DEVICE = 2


def is_rehomed(tiers: UInt8Array) -> BoolArray:
    """Map uint8 [n] tiers to bool [n]: true for rows that live in another node than their home."""
    moved: BoolArray = tiers >= REHOMED
    return moved


def nodes_of_rehomed(tiers: UInt8Array) -> Int64Array:
    """Map uint8 [n] tiers to the int64 [n] nodes in which the re-homed rows among them live; below 0 for all others."""
    return tiers.astype(np.int64) - REHOMED


def without_moves(tiers: UInt8Array) -> UInt8Array:
    """Return uint8 [n] tiers with re-homed rows at HOME."""
    return np.where(is_rehomed(tiers), np.uint8(Tier.HOME), tiers).astype(np.uint8)


def by_slots(tiers: UInt8Array) -> UInt8Array:
    """Map uint8 [n] tiers to numbers that grow with the replica slots that a row takes: HOME, moved, NODE, DEVICE."""
    return np.array([0, 2, 3, 1], dtype=np.uint8)[np.minimum(tiers, REHOMED)]


@dataclass(frozen=True)
class RankLayout:
    """``nodes`` x ``local_ranks`` ranks, numbered node by node as torchrun does.

    Methods that take addresses (``flexd.core.keyspace``; of a table that is spread over all ranks they are its keys):
    the home rank is ``address % world_size``; inside any node its owner is the local rank ``address % local_ranks``,
    which in the home node is the home rank itself.
    """

    nodes: int
    local_ranks: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.local_ranks < 1:
            raise TopologyError(
                f"layout of {self.nodes} nodes x {self.local_ranks} local ranks is not possible",
                remedy="both must be at least 1",
            )

    @property
    def world_size(self) -> int:
        return self.nodes * self.local_ranks

    def node_of(self, rank: int) -> int:
        return rank // self.local_ranks

    def local_rank_of(self, rank: int) -> int:
        return rank % self.local_ranks

    def rank_of(self, node: int, local_rank: int) -> int:
        return node * self.local_ranks + local_rank

    def node_ranks(self, node: int) -> list[int]:
        """Return the ranks of one node."""
        return [self.rank_of(node, local) for local in range(self.local_ranks)]

    def rail_ranks(self, local_rank: int) -> list[int]:
        """Return the ranks of equal local rank (a rail), one in each node."""
        return [self.rank_of(node, local_rank) for node in range(self.nodes)]

    def home_rank(self, addresses: Int64Array) -> Int64Array:
        """Map int64[n] addresses to int64[n] home ranks."""
        return addresses % self.world_size

    def home_node(self, addresses: Int64Array) -> Int64Array:
        """Map int64[n] addresses to the int64[n] nodes of their home ranks."""
        return (addresses % self.world_size) // self.local_ranks

    def holds_replica(self, rank: int, addresses: Int64Array, tiers: UInt8Array) -> BoolArray:
        """Return bool[n]: true where ``rank`` has a copy of the row in a replica slot at its tier: beside the home
        copy, or, of a re-homed row, in its place."""
        home = self.home_rank(addresses)
        node = (
            (tiers == Tier.NODE)
            & (addresses % self.local_ranks == self.local_rank_of(rank))
            & (home // self.local_ranks != self.node_of(rank))
        )
        moved = (
            (nodes_of_rehomed(tiers) == self.node_of(rank))
            & (addresses % self.local_ranks == self.local_rank_of(rank))
            & (home != rank)
        )
        held: BoolArray = node | moved | ((tiers == Tier.DEVICE) & (home != rank))
        return held

    def replica_slots_used(self, addresses: Int64Array, tiers: UInt8Array) -> Int64Array:
        """Return int64[world_size]: replica slots that rows at these tiers use on each rank."""
        home = self.home_rank(addresses)
        world = self.world_size
        device_by_home = np.bincount(home[tiers == Tier.DEVICE], minlength=world)
        node_by_home = np.bincount(home[tiers == Tier.NODE], minlength=world).reshape(self.nodes, self.local_ranks)
        node = node_by_home.sum(axis=0, keepdims=True) - node_by_home
        nodes = nodes_of_rehomed(tiers)
        ranks = nodes * self.local_ranks + addresses % self.local_ranks
        moved = np.bincount(ranks[(nodes >= 0) & (ranks != home)], minlength=world)
        used: Int64Array = (device_by_home.sum() - device_by_home + node.reshape(world) + moved).astype(np.int64)
        return used


_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _row_hash(keys: Int64Array, tiers: UInt8Array) -> UInt64Array:
    # Return splitmix64 of (key, tier). A HOME row hashes to 0, so that only listed rows count.
    # Two bits of a tier beside the key; what is above them, of re-homed rows, is mixed in.
    x = (keys.astype(np.uint64) << np.uint64(2)) + (tiers & np.uint8(3)) + np.uint64(0x9E3779B97F4A7C15)
    x ^= (tiers >> np.uint8(2)).astype(np.uint64) * _MIX[1]
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    x ^= x >> np.uint64(31)
    return np.where(tiers == Tier.HOME, np.uint64(0), x)


@dataclass(frozen=True)
class Delta:
    """Rows whose tier changes: int64[n] ``keys`` (unique), uint8[n] ``old_tiers`` and ``new_tiers``.

    Rows are applied in order; any prefix leaves a valid placement.
    """

    keys: Int64Array
    old_tiers: UInt8Array
    new_tiers: UInt8Array

    def __len__(self) -> int:
        return len(self.keys)

    @staticmethod
    def empty() -> Delta:
        return Delta(np.empty(0, np.int64), np.empty(0, np.uint8), np.empty(0, np.uint8))

    def select(self, index: Int64Array | slice) -> Delta:
        """Return some of the rows."""
        return Delta(self.keys[index], self.old_tiers[index], self.new_tiers[index])

    def chunks(self, rows_per_chunk: int) -> Iterator[Delta]:
        """Yield successive slices of at most ``rows_per_chunk`` rows."""
        for start in range(0, len(self), max(1, rows_per_chunk)):
            yield self.select(slice(start, start + max(1, rows_per_chunk)))

    def digest_change(self) -> int:
        """Return the change of ``Placement.digest`` (mod 2^64) when this delta is applied."""
        after, before = (_row_hash(self.keys, tiers).sum(dtype=np.uint64) for tiers in (self.new_tiers, self.old_tiers))
        return (int(after) - int(before)) % 2**64


@dataclass(frozen=True)
class Placement:
    """Listed rows (with copies, or moved) as sorted int64[n] ``keys`` with uint8[n] ``tiers``; every other row is HOME.

    A tier of ``REHOMED`` or more states the node in which a re-homed row lives.

    ``version`` counts the applied chunks. Immutable: ``apply`` returns the next placement.
    """

    keys: Int64Array
    tiers: UInt8Array
    version: int = 0

    def __len__(self) -> int:
        return len(self.keys)

    @staticmethod
    def empty(version: int = 0) -> Placement:
        return Placement(np.empty(0, np.int64), np.empty(0, np.uint8), version)

    @staticmethod
    def of(keys: Int64Array, tiers: UInt8Array, version: int = 0) -> Placement:
        """Sort the rows and drop HOME rows. Raises PlacementError on repeated keys."""
        hot = tiers != Tier.HOME
        keys, tiers = keys[hot], tiers[hot]
        order = np.argsort(keys, kind="stable")
        keys, tiers = keys[order], tiers[order]
        if len(keys) > 1 and bool((keys[1:] == keys[:-1]).any()):
            raise PlacementError("a row is listed twice in a placement", remedy="list every row once")
        return Placement(keys.astype(np.int64), tiers.astype(np.uint8), version)

    @cached_property
    def copies(self) -> Placement:
        """The placement with re-homed rows at HOME."""
        kept = ~is_rehomed(self.tiers)
        return self if kept.all() else replace(self, keys=self.keys[kept], tiers=self.tiers[kept])

    @cached_property
    def rehomed(self) -> Placement:
        """The re-homed rows alone."""
        kept = is_rehomed(self.tiers)
        return replace(self, keys=self.keys[kept], tiers=self.tiers[kept])

    def tiers_of(self, keys: Int64Array) -> UInt8Array:
        """Map int64[n] keys in any order to uint8[n] tiers."""
        tiers = np.zeros(len(keys), dtype=np.uint8)
        found, at = matches(self.keys, keys)
        tiers[found] = self.tiers[at]
        return tiers

    def digest(self) -> int:
        """Return a 64-bit digest of the listed rows that does not depend on their order."""
        return int(_row_hash(self.keys, self.tiers).sum(dtype=np.uint64))

    def apply(self, delta: Delta) -> Placement:
        """Return the placement after one chunk, with ``version`` one higher.

        Raises:
            PlacementError: a row of the delta is not at its ``old_tier`` here, or appears twice.
        """
        if not np.array_equal(self.tiers_of(delta.keys), delta.old_tiers):
            raise PlacementError(
                f"delta of {len(delta)} rows does not start from placement version {self.version}",
                remedy="make the delta against the live placement",
            )
        kept = ~np.isin(self.keys, delta.keys)
        return Placement.of(
            np.concatenate([self.keys[kept], delta.keys]),
            np.concatenate([self.tiers[kept], delta.new_tiers]),
            self.version + 1,
        )

    def delta_to(self, target: Placement) -> Delta:
        """Return the rows whose tier differs, by key, demotions first: they free the slots that promotions need. Rows
        that leave a slot in one node for one in another come between."""
        keys = np.sort(np.concatenate([self.keys, target.keys]))
        keys = keys[first_of_run(keys)]
        old, new = self.tiers_of(keys), target.tiers_of(keys)
        changed = old != new
        keys, old, new = keys[changed], old[changed], new[changed]
        between = (is_rehomed(old) | is_rehomed(new)) & (old != Tier.HOME) & (new != Tier.HOME)
        order = np.lexsort((keys, np.where(between, 1, 2 * (new > old))))
        return Delta(keys[order], old[order], new[order])
