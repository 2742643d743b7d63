"""Which replicated rows a step touches on any rank, agreed by one bit a listed row.

Ranks that hold copies of the same rows list them in the same order, so they exchange bits of their directories instead
of ids. The bits of the rows that a pass reads go up the hops with its ids; the union over all ranks returns with
its rows (``LookupPiggyback``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, cycle

import numpy as np
import numpy.typing as npt
import torch

from flexd.core.layout import RankLayout
from flexd.embedding import devices
from flexd.embedding.exchange.hop import Hop, PeerWords
from flexd.embedding.store.directory import Directory
from flexd.embedding.store.store import GroupStore

_WORD_BITS = 64

Span = tuple[int, int]
"""First and end."""


@dataclass(frozen=True)
class SyncList:
    """Listed rows that this rank and its peers of one hop exchange bits or gradients of, in one direction.

    Their bits are ordered by peer and dim-group, and padded for each peer to whole words.

    Attributes:
        spans: ``[peer][group]`` ranges of the entries, which are the rows of all directories one after another; or
            ranges of ``chosen``.
        chosen: int32 [m] entries; None: all of them.
        padded: whether the bits of each peer are padded to whole words.
        nowhere: the entry that does not exist, which stands for padding.
        device: where the bits are.
    """

    spans: list[list[Span]]
    chosen: torch.Tensor | None
    padded: bool
    nowhere: int
    device: torch.device

    @cached_property
    def words(self) -> list[int]:
        """Number of 64-bit words of each peer."""
        return [-(-sum(end - first for first, end in of_peer) // _WORD_BITS) for of_peer in self.spans]

    @cached_property
    def _parts(self) -> list[tuple[Span, Span]]:
        """Of each peer and dim-group: the span of entries, and the span of their bits."""
        parts: list[tuple[Span, Span]] = []
        for start, of_peer in zip(accumulate(self.words, initial=0), self.spans, strict=False):
            at = start * _WORD_BITS if self.padded else (parts[-1][1][1] if parts else 0)
            for first, end in of_peer:
                parts.append(((first, end), (at, at + end - first)))
                at += end - first
        return parts

    @property
    def _length(self) -> int:
        if self.padded:
            return sum(self.words) * _WORD_BITS
        return self._parts[-1][1][1] if self._parts else 0

    @cached_property
    def index(self) -> torch.Tensor:
        """int32 [n] entry of each bit, for accelerators: one kernel for any number of peers and dim-groups."""
        at = np.full(self._length, -1, dtype=np.int32)
        for (first, end), (start, stop) in self._parts:
            at[start:stop] = np.arange(first, end)
        index = torch.from_numpy(at).to(self.device)
        if self.chosen is not None and len(self.chosen):
            index = torch.where(index < 0, -1, self.chosen.index_select(0, index.clamp(min=0)))
        return torch.where(index < 0, self.nowhere, index)

    @property
    def nbytes(self) -> int:
        """Bytes of ``chosen`` and ``index``, where they exist."""
        held = (self.chosen, vars(self).get("index"))
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def gather(self, entries: torch.Tensor) -> torch.Tensor:
        """uint8 [entries] -> uint8 [n] bits of the listed rows."""
        if not devices.in_host_memory(entries):
            return entries.index_select(0, self.index)
        of = entries if self.chosen is None else entries.index_select(0, self.chosen)
        bits = entries.new_zeros(self._length)
        for (first, end), (start, stop) in self._parts:
            if end > first:
                bits[start:stop] = of[first:end]
        return bits

    def scatter(self, bits: torch.Tensor, entries: torch.Tensor) -> None:
        """Set the ``entries`` whose bit is set for any peer; the inverse of ``gather``."""
        if not devices.in_host_memory(entries):
            # The bits of padding are 0, so the entry that does not exist stays 0.
            entries.scatter_reduce_(0, self.index.to(torch.int64), bits, "amax")
            return
        into = entries if self.chosen is None else entries.new_zeros(len(self.chosen))
        for (first, end), (start, stop) in self._parts:
            if end > first:
                into[first:end] |= bits[start:stop]
        if self.chosen is not None:
            entries.scatter_reduce_(0, self.chosen.to(torch.int64), into, "amax")

    def counts(self, bits: torch.Tensor) -> list[int]:
        """uint8 [n] bits in host memory -> numbers of set ones by peer and dim-group."""
        ones = bits.numpy()  # a hundredth of the time of torch's sum
        return [int(np.count_nonzero(ones[start:stop])) for _, (start, stop) in self._parts]

    @cached_property
    def bounds(self) -> npt.NDArray[np.int64]:
        """int64 [peers x dim-groups, 2], first and end bit of each peer and dim-group."""
        return np.array([span for _, span in self._parts], dtype=np.int64).reshape(-1, 2)

    def of_groups(self, groups: Sequence[bool], bits: torch.Tensor) -> tuple[SyncList, torch.Tensor]:
        """Return the list of some dim-groups, without padding, and their part of its ``bits`` uint8 [n]."""
        spans = [
            [(first, end if keep else first) for keep, (first, end) in zip(groups, of_peer, strict=True)]
            for of_peer in self.spans
        ]
        kept = [bits[start:stop] for keep, (_, (start, stop)) in zip(cycle(groups), self._parts, strict=False) if keep]
        return replace(self, spans=spans, padded=False), torch.cat(kept) if kept else bits[:0]

    def entries_of(self, bits: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """uint8 [n] bits with ``counts`` set ones in each part -> int64 entries whose bit is set, part after part."""
        shifts = torch.tensor([first - start for (first, _), (start, _) in self._parts], device=bits.device)
        at = positions_of(bits)
        of_parts = torch.tensor(list(counts), dtype=torch.int64, device=bits.device)
        at = at + shifts.repeat_interleave(of_parts, output_size=sum(counts))
        return at if self.chosen is None else self.chosen.index_select(0, at).to(torch.int64)


@dataclass(frozen=True)
class SyncLists:
    """The replicated rows of this rank, by the peers that they are synchronised with.

    Attributes:
        upstream: per hop, rows whose home is reached over a peer: their gradients go there, their sums come from there.
        downstream: per hop, rows of which peers hold copies and send their gradients to this rank.
        reduced: per hop, rows that all its peers hold, if it all-reduces: in the same order on each of them.
        first_entries: entry at which each dim-group begins, and the number of entries.
        used: per hop, whether any of its ranks may list rows that are exchanged over it. Equal on all of them.
    """

    upstream: list[SyncList]
    downstream: list[SyncList]
    reduced: list[SyncList]
    first_entries: list[int]
    used: list[bool]

    @property
    def rows(self) -> int:
        return self.first_entries[-1]

    @cached_property
    def weights(self) -> torch.Tensor:
        """uint8 [8], 2 to the power of the place."""
        return 2 ** torch.arange(8, dtype=torch.uint8, device=self.upstream[0].device)

    @property
    def nbytes(self) -> int:
        """Bytes of the lists: 4 for each row with direct exchange, or with NODE and DEVICE rows on a rail, else 0; 4
        more for each row of each list on an accelerator."""
        return sum(rows.nbytes for lists in (self.upstream, self.downstream, self.reduced) for rows in lists)

    @staticmethod
    def of(stores: Sequence[GroupStore], hops: Sequence[Hop], layout: RankLayout) -> SyncLists:
        """Build the lists of the directories as they are now."""
        directories = [store.directory for store in stores]
        firsts = [0, *accumulate(len(directory) for directory in directories)]
        based = list(zip(directories, firsts, strict=False))
        device = stores[0].rows.device
        upstream, downstream, reduced, used = [], [], [], []
        for hop in hops:
            rank, peers = hop.peers.rank, hop.peers.ranks
            local = layout.local_rank_of(rank)
            on_my_rail = [layout.local_rank_of(peer) == local for peer in peers]
            homes = torch.arange(layout.world_size)
            reached = hop.destination(homes).tolist()
            # Over a rail no other rows than its own are exchanged.
            over = [home for home in homes.tolist() if not all(on_my_rail) or home % layout.local_ranks == local]
            away = [[home for home in over if reached[home] == p and home != rank] for p in range(hop.peers.size)]
            mine = [home for home in over if reached[home] == hop.peers.index]
            upstream.append(
                SyncList(
                    [
                        [_span(d, first, away[p] if p != hop.peers.index else []) for d, first in based]
                        for p in range(hop.peers.size)
                    ],
                    None,
                    True,
                    firsts[-1],
                    device,
                )
            )
            downstream.append(_downstream(based, hop, mine, on_my_rail, firsts[-1]))
            own = [home for home in homes.tolist() if home % layout.local_ranks == local] if hop.all_reduces else []
            of_rail = [_span(directory, first, own) for directory, first in based]
            reduced.append(SyncList([of_rail], None, False, firsts[-1], device))
            # Ranks of a rail or node have rows in common or none; a rank does not have the lists of other rails.
            alike = all(on_my_rail) or not any(hop.peers.far)
            used.append(not alike or any(upstream[-1].words) or any(downstream[-1].words))
        return SyncLists(upstream, downstream, reduced, firsts, used)


class TouchedRows:
    """Listed rows that passes of a step read: on this rank and those below it, then (``complete``) on any rank.

    A ``LookupPiggyback``.
    """

    def __init__(self, lists: SyncLists, device: torch.device) -> None:
        self.lists = lists
        self.entries = torch.zeros(lists.rows + 1, dtype=torch.uint8, device=device)
        """uint8 [listed rows + 1], of all directories; the last is the entry that does not exist."""
        self.up_sent: list[torch.Tensor] = []
        self.up_received: list[torch.Tensor] = []
        self.down_received: list[torch.Tensor | None] = [None] * len(lists.upstream)
        self.down_sent: list[torch.Tensor | None] = [None] * len(lists.upstream)

    def add(self, entries: torch.Tensor) -> None:
        mark(self.entries, entries.remainder(self.lists.rows + 1))  # -1 becomes the entry that does not exist

    def up(self, hop: int) -> PeerWords:
        upstream, downstream = self.lists.upstream[hop], self.lists.downstream[hop]
        bits = upstream.gather(self.entries)
        self.up_sent.append(bits)
        return PeerWords(_packed(bits, self.lists.weights), upstream.words, downstream.words)

    def recv_up(self, hop: int, words: torch.Tensor) -> None:
        bits = _unpacked(words, self.lists.weights)
        self.up_received.append(bits)
        self.lists.downstream[hop].scatter(bits, self.entries)

    def down(self, hop: int) -> PeerWords:
        upstream, downstream = self.lists.upstream[hop], self.lists.downstream[hop]
        bits = downstream.gather(self.entries)
        self.down_sent[hop] = bits
        return PeerWords(_packed(bits, self.lists.weights), downstream.words, upstream.words)

    def recv_down(self, hop: int, words: torch.Tensor) -> None:
        bits = _unpacked(words, self.lists.weights)
        self.down_received[hop] = bits
        self.lists.upstream[hop].scatter(bits, self.entries)

    @property
    def complete(self) -> bool:
        return all(bits is not None for bits in self.down_received)

    @staticmethod
    def union(parts: Sequence[TouchedRows]) -> TouchedRows:
        """Unite the touched rows of several passes over one placement."""
        if len(parts) == 1:
            return parts[0]
        whole = TouchedRows(parts[0].lists, parts[0].entries.device)
        whole.entries = _union([part.entries for part in parts])
        for hop in range(len(whole.down_received)):
            whole.up_sent.append(_union([part.up_sent[hop] for part in parts]))
            whole.up_received.append(_union([part.up_received[hop] for part in parts]))
            if all(part.complete for part in parts):
                received = [bits for part in parts if (bits := part.down_received[hop]) is not None]
                sent = [bits for part in parts if (bits := part.down_sent[hop]) is not None]
                whole.down_received[hop], whole.down_sent[hop] = _union(received), _union(sent)
        return whole

    def positions(self, group: int) -> torch.Tensor:
        """Return int64 directory positions of the touched rows of a dim-group."""
        first, end = self.lists.first_entries[group : group + 2]
        return positions_of(self.entries[first:end])

    def all_positions(self) -> torch.Tensor:
        """Return int64 touched entries of all directories."""
        return positions_of(self.entries[: self.lists.rows])

    def split(self, other: TouchedRows) -> tuple[TouchedRows, TouchedRows]:
        """Split into (rows that ``other`` has too, all the rest). Both are complete and of one placement."""
        return self._masked(other.entries), self._masked(1 - other.entries)

    def _masked(self, entries: torch.Tensor) -> TouchedRows:
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


def mark(entries: torch.Tensor, at: torch.Tensor) -> None:
    """Set uint8 ``entries`` at int [n] places; the last entry stays 0."""
    entries.index_fill_(0, at.to(torch.int64), 1)
    entries[-1:].zero_()


def positions_of(bits: torch.Tensor) -> torch.Tensor:
    """Return the int64 positions of the ones in uint8 [n] zeros and ones."""
    if devices.in_host_memory(bits):  # numpy tests eight at a time: a tenth of the time where ones are few
        return torch.from_numpy(np.flatnonzero(bits.numpy().view(np.bool_)))
    return bits.nonzero().view(-1)


def _span(directory: Directory, base: int, homes: Sequence[int]) -> Span:
    """Return the entries of the rows of some home ranks, which are adjacent."""
    if not homes:
        return base, base
    places = sorted(directory.order.place_of(home) for home in homes)
    assert places[-1] - places[0] + 1 == len(places)  # noqa: S101
    return base + directory.bounds[places[0]], base + directory.bounds[places[-1] + 1]


def _downstream(
    based: Sequence[tuple[Directory, int]], hop: Hop, mine: Sequence[int], on_my_rail: Sequence[bool], nowhere: int
) -> SyncList:
    """List the rows of the homes ``mine`` that each peer holds: all of them on this rank's rail, else DEVICE rows."""
    others = [p for p in range(hop.peers.size) if p != hop.peers.index]
    whole = [_span(directory, base, mine) for directory, base in based]
    several = any(directory.rail_device is not None for directory, _ in based)
    if not several or all(on_my_rail[p] for p in others):
        of_all = [whole if p in others else [(0, 0)] * len(based) for p in range(hop.peers.size)]
        return SyncList(of_all, None, True, nowhere, based[0][0].codes.device)
    # ``chosen`` holds both lists: all rows, then the DEVICE rows.
    alls: list[Span] = []
    devices: list[Span] = []
    lists, at = [], 0
    device = based[0][0].codes.device
    for lists_all, spans in ((any(on_my_rail[p] for p in others), alls), (True, devices)):
        for (directory, base), (first, end) in zip(based, whole, strict=True):
            part = torch.arange(first, end if lists_all else first, dtype=torch.int32, device=device)
            if spans is devices and directory.rail_device is not None:
                rows = directory.rail_device
                inside = torch.searchsorted(rows, torch.tensor([first - base, end - base], device=device)).tolist()
                part = rows[inside[0] : inside[1]] + base
            lists.append(part)
            spans.append((at, at + len(part)))
            at += len(part)
    nothing = [(0, 0)] * len(based)
    of_peers = [nothing if p not in others else alls if on_my_rail[p] else devices for p in range(hop.peers.size)]
    return SyncList(of_peers, torch.cat(lists), True, nowhere, device)


def _union(bits: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(bits)).amax(dim=0)


def _packed(bits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """uint8 [64 n] zeros and ones -> int64 [n]. ``weights``: uint8 [8], of the bits of a byte."""
    if devices.in_host_memory(bits):  # a twentieth of the time
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little").view(np.int64))
    return (bits.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8).view(torch.int64)


def _unpacked(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """int64 [n] -> uint8 [64 n] zeros and ones; the inverse of ``_packed``."""
    if devices.in_host_memory(words):
        return torch.from_numpy(np.unpackbits(words.numpy().view(np.uint8), bitorder="little"))
    return (words.view(torch.uint8).unsqueeze(1) & weights).ne(0).view(torch.uint8).view(-1)
