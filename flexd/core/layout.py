"""Arithmetic of ranks, nodes, home ranks and node owners."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from flexd.core.arrays import BoolArray, Int64Array, UInt8Array
from flexd.core.errors import TopologyError

REHOMED = 3
"""``REHOMED + n`` in place of a tier: the row's one copy is in node n, on the node owner of its rail there, and not in
the node of its home rank."""
MAX_REHOMED_NODES = 256 - REHOMED
"""Nodes that such numbers have room for in a byte."""


class Tier(IntEnum):
    """Tier of a row, which states where its copies live. Chunks contain the value."""

    HOME = 0
    """One copy, on the home rank."""
    NODE = 1
    """One copy in every node, on the node owner."""
    DEVICE = 2
    """A copy on every rank."""


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
    order = np.array([0, 2, 3, 1], dtype=np.uint8)
    return order[np.minimum(tiers, REHOMED)]


@dataclass(frozen=True)
class RankLayout:
    """``nodes`` x ``local_ranks`` ranks, numbered node by node as torchrun does.

    Methods that take addresses (``flexd.core.homes``; of a table that is spread over all ranks they are its keys): the
    home rank is ``address % world_size``; inside any node its owner is the local rank ``address % local_ranks``, which
    in the home node is the home rank itself.
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
