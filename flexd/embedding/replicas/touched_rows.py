"""Which replicated rows a step touches on any rank, agreed by one bit a listed row.

Ranks that hold copies of the same rows have them in the same blocks of entries, in the same order, so they exchange
bits of these blocks instead of ids. The bits of the rows that a pass reads go up the hops with its ids; the union over
all ranks returns with its rows (``Router.find``, ``Router.fetch``).

A set of rows has a byte of zero or one for each, since kernels cannot set single bits without a race; sets travel as
64-bit words, a block in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from flexd.core.arrays import Int64Array
from flexd.core.placement import RankLayout
from flexd.embedding.exchange.hop import Hop, PeerWords
from flexd.embedding.store.directory import BLOCK, Directory

RowBits = torch.Tensor
"""uint8 [64 blocks] zeros and ones."""
# Times eight bytes of zero or one: the top byte of the product has the lowest bit of each.
_TO_TOP_BYTE = 0x0102040810204080


def none_set(entries: int, device: torch.device) -> RowBits:
    """Return the empty set of ``entries`` rows, a multiple of 64, with one more block for what is not listed."""
    return torch.zeros(entries + BLOCK, dtype=torch.uint8, device=device)


def mark(bits: RowBits, entries: torch.Tensor) -> None:
    """Add int64 [n] entries, repeats allowed."""
    bits.index_fill_(0, entries, 1)


def positions_of(bits: RowBits, first_block: int = 0, end_block: int | None = None) -> torch.Tensor:
    """Return int64 [n] the members within some blocks, ascending."""
    at = bits.view(-1, BLOCK)[first_block:end_block].reshape(-1).nonzero().view(-1)
    return at + first_block * BLOCK if first_block else at


def union_of(sets: Sequence[RowBits]) -> RowBits:
    return torch.stack(list(sets)).amax(dim=0)


def packed(bits: RowBits) -> torch.Tensor:
    """Return int64 [blocks] words."""
    top_bytes = (bits.view(torch.int64) * _TO_TOP_BYTE).view(torch.uint8)[7::8]
    return top_bytes.clone(memory_format=torch.contiguous_format).view(torch.int64)


def unpacked(words: torch.Tensor, weights: torch.Tensor) -> RowBits:
    """Return the set of int64 [blocks] words; the inverse of ``packed``. ``weights``: uint8 [8], 2 to the power of the
    place."""
    return (words.view(torch.uint8).unsqueeze(1) & weights).ne(0).view(torch.uint8).view(-1)


@dataclass(frozen=True)
class SyncList:
    """Listed rows that this rank and its peers of one hop exchange bits or gradients of, in one direction.

    Their bits are ordered by peer and dim-group, a word a block of entries.

    Attributes:
        blocks: ``[peer][group]`` int64 blocks of ``BLOCK`` entries; each once per peer.
        device: where the bits are.
    """

    blocks: list[list[Int64Array]]
    device: torch.device

    @cached_property
    def words(self) -> list[int]:
        """Number of 64-bit words of each peer."""
        return [sum(map(len, of_peer)) for of_peer in self.blocks]

    @cached_property
    def index(self) -> torch.Tensor:
        """int64 [words] block of each word."""
        parts = [of_group for of_peer in self.blocks for of_group in of_peer]
        return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts])).to(self.device)

    def gather(self, entries: RowBits) -> RowBits:
        """Return the bits of the listed rows, of bits of all entries."""
        if not self.index.shape[0]:
            return entries[:0]
        return entries.view(-1, BLOCK).index_select(0, self.index).view(-1)

    def scatter(self, bits: RowBits, entries: RowBits) -> None:
        """Set the ``entries`` whose bit is set for any peer; the inverse of ``gather``."""
        table, rows = entries.view(-1, BLOCK), bits.view(-1, BLOCK)
        table.scatter_reduce_(0, self.index.unsqueeze(1).expand(-1, BLOCK), rows, "amax")


@dataclass(frozen=True)
class SyncLists:
    """The replicated rows of this rank, by the peers that they are synchronised with.

    Attributes:
        upstream: per hop, rows whose home is reached over a peer: their gradients go there, their sums come from there.
        downstream: per hop, rows of which peers hold copies and send their gradients to this rank.
        reduced: per hop, rows that all its peers hold, if it all-reduces: in the same order on each of them.
        first_entries: entry at which each dim-group begins, and the number of entries.
        used: per hop, whether any of its ranks may list rows that are exchanged over it. Equal on all of them.
        read_only: the dim-groups whose rows are not trained: none of these are listed.
    """

    upstream: list[SyncList]
    downstream: list[SyncList]
    reduced: list[SyncList]
    first_entries: list[int]
    used: list[bool]
    read_only: list[int]

    @property
    def rows(self) -> int:
        return self.first_entries[-1]

    @cached_property
    def weights(self) -> torch.Tensor:
        """uint8 [8], 2 to the power of the place."""
        return 2 ** torch.arange(8, dtype=torch.uint8, device=self.upstream[0].device)

    @staticmethod
    def of(directory: Directory, hops: Sequence[Hop], layout: RankLayout, trained: Sequence[bool]) -> SyncLists:
        """Build the lists of a directory as it is now, in time proportional to its blocks.

        Args:
            trained: of each dim-group.
        """
        blocks = _BlocksByHome(directory, trained)
        device = directory.device
        upstream, downstream, reduced, used = [], [], [], []
        for hop in hops:
            rank, peers = hop.peers.rank, hop.peers.ranks
            local = layout.local_rank_of(rank)
            on_my_rail = [layout.local_rank_of(peer) == local for peer in peers]
            homes = torch.arange(layout.world_size)
            reached = hop.destination(homes).tolist()
            # Over a rail no other rows than its own are exchanged.
            over = [home for home in homes.tolist() if not all(on_my_rail) or home % layout.local_ranks == local]
            away: list[list[int]] = [[] for _ in peers]
            for home in over:
                if home != rank:
                    away[reached[home]].append(home)
            mine = [home for home in over if reached[home] == hop.peers.index]
            to_peers = [blocks.of(away[p] if p != hop.peers.index else []) for p in range(hop.peers.size)]
            upstream.append(SyncList(to_peers, device))
            # A peer off the rail holds the DEVICE rows alone.
            shared, on_rail, nothing = blocks.of(mine, device_only=True), blocks.of(mine), blocks.of([])
            from_peers = [
                nothing if p == hop.peers.index else on_rail if on_my_rail[p] else shared for p in range(hop.peers.size)
            ]
            downstream.append(SyncList(from_peers, device))
            own = [home for home in homes.tolist() if home % layout.local_ranks == local] if hop.all_reduces else []
            reduced.append(SyncList([blocks.of(own)], device))
            # Ranks of a rail or node have rows in common or none; a rank does not have the lists of other rails.
            alike = all(on_my_rail) or not any(hop.peers.far)
            used.append(any(trained) and (not alike or any(upstream[-1].words) or any(downstream[-1].words)))
        read_only = [group for group, trains in enumerate(trained) if not trains]
        return SyncLists(upstream, downstream, reduced, directory.first_entries, used, read_only)


class _BlocksByHome:
    """Blocks of entries of trained rows by tier, dim-group and home: in the same order on all ranks that list them."""

    def __init__(self, directory: Directory, trained: Sequence[bool]) -> None:
        self._directory, self._trained = directory, trained
        self._pools = []
        for pool, start in zip(directory.pools, directory.starts, strict=False):
            order, bounds = pool.blocks_by_home()
            self._pools.append((order + start // BLOCK, bounds.tolist()))

    def of(self, homes: Sequence[int], *, device_only: bool = False) -> list[Int64Array]:
        """Return the blocks of each dim-group whose rows have one of some homes, which are adjacent."""
        places = sorted(self._directory.places_by_home[home] for home in homes) or [0, -1]
        assert places[-1] - places[0] + 1 == len(homes)  # noqa: S101
        found = []
        for group, trained in enumerate(self._trained):
            if not trained:
                found.append(np.empty(0, np.int64))
                continue
            parts = [
                order[bounds[places[0]] : bounds[places[-1] + 1]]
                for order, bounds in self._pools[2 * group + device_only : 2 * group + 2]
            ]
            parts = [part for part in parts if len(part)] or parts[:1]
            found.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
        return found


class TouchedRows:
    """Listed rows that passes of a step read: on this rank and those below it, then (``complete``) on any rank.

    Words travel with the ids and rows of a look-up. Called in the order of the stations: ``add`` for station 0, ``up``
    and ``recv_up`` of hop 0, ``add`` of station 1, and so on; then ``down`` and ``recv_down`` from the last hop to the
    first.
    """

    def __init__(self, lists: SyncLists, device: torch.device) -> None:
        self.lists = lists
        self.entries = none_set(lists.rows, device)
        """Of all entries; the block after them is of rows that are not listed, and undefined."""
        self.up_sent: list[RowBits] = []
        self.up_received: list[RowBits] = []
        self.down_received: list[RowBits | None] = [None] * len(lists.upstream)
        self.down_sent: list[RowBits | None] = [None] * len(lists.upstream)

    def add(self, entries: torch.Tensor) -> None:
        """Add the rows of a station: int64 [n] entries of listed rows, their number for all others."""
        mark(self.entries, entries)
        for group in self.lists.read_only:
            self.entries[slice(*self.lists.first_entries[group : group + 2])] = 0

    def up(self, hop: int) -> PeerWords:
        """Return the words that travel with the ids of a hop."""
        upstream, downstream = self.lists.upstream[hop], self.lists.downstream[hop]
        bits = upstream.gather(self.entries)
        self.up_sent.append(bits)
        return PeerWords(packed(bits), upstream.words, downstream.words)

    def recv_up(self, hop: int, words: torch.Tensor) -> None:
        bits = unpacked(words, self.lists.weights)
        self.up_received.append(bits)
        self.lists.downstream[hop].scatter(bits, self.entries)

    def down(self, hop: int) -> PeerWords:
        """Return the words that travel with the rows of a hop."""
        upstream, downstream = self.lists.upstream[hop], self.lists.downstream[hop]
        bits = downstream.gather(self.entries)
        self.down_sent[hop] = bits
        return PeerWords(packed(bits), downstream.words, upstream.words)

    def recv_down(self, hop: int, words: torch.Tensor) -> None:
        bits = unpacked(words, self.lists.weights)
        self.down_received[hop] = bits
        self.lists.upstream[hop].scatter(bits, self.entries)

    @property
    def complete(self) -> bool:
        """True once ``recv_down`` was called for every hop. Then no bits are sent with the rows."""
        return all(bits is not None for bits in self.down_received)

    @staticmethod
    def union(parts: Sequence[TouchedRows]) -> TouchedRows:
        """Unite the touched rows of several passes over one placement."""
        if len(parts) == 1:
            return parts[0]
        whole = TouchedRows(parts[0].lists, parts[0].entries.device)
        whole.entries = union_of([part.entries for part in parts])
        for hop in range(len(whole.down_received)):
            whole.up_sent.append(union_of([part.up_sent[hop] for part in parts]))
            whole.up_received.append(union_of([part.up_received[hop] for part in parts]))
            if all(part.complete for part in parts):
                received = [bits for part in parts if (bits := part.down_received[hop]) is not None]
                sent = [bits for part in parts if (bits := part.down_sent[hop]) is not None]
                whole.down_received[hop], whole.down_sent[hop] = union_of(received), union_of(sent)
        return whole

    def entries_of_group(self, group: int) -> torch.Tensor:
        """Return int64 entries of the touched rows of a dim-group."""
        first, end = self.lists.first_entries[group : group + 2]
        return positions_of(self.entries, first // BLOCK, end // BLOCK)

    def split(self, other: TouchedRows) -> tuple[TouchedRows, TouchedRows]:
        """Split into (rows that ``other`` has too, all the rest). Both are complete and of one placement."""
        return self._masked(other.entries), self._masked(1 - other.entries)

    def _masked(self, entries: RowBits) -> TouchedRows:
        part = TouchedRows(self.lists, entries.device)
        part.entries = self.entries & entries
        for hop, (up, down) in enumerate(zip(self.lists.upstream, self.lists.downstream, strict=True)):
            upstream, downstream = up.gather(entries), down.gather(entries)
            part.up_sent.append(self.up_sent[hop] & upstream)
            part.up_received.append(self.up_received[hop] & downstream)
            received, sent = self.down_received[hop], self.down_sent[hop]
            part.down_received[hop] = None if received is None else received & upstream
            part.down_sent[hop] = None if sent is None else sent & downstream
        return part


def entries_at(blocks: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """int64 [words] block of each word, int64 [n] numbers of bits -> int64 [n] their entries."""
    word = torch.div(bits, BLOCK, rounding_mode="floor")
    return blocks.index_select(0, word) * BLOCK + (bits - word * BLOCK)
