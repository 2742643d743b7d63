"""Which replicated rows two ranks tell each other about: stretches of their directories, told one bit a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, cycle

import numpy as np
import torch

from flexd.core.layout import RankLayout
from flexd.embedding.exchange.hop import Hop
from flexd.embedding.replicas.directory import Directory
from flexd.embedding.store.store import GroupStore

_WORD_BITS = 64

Span = tuple[int, int]
"""First and end."""


def positions_of(bits: torch.Tensor) -> torch.Tensor:
    """uint8 [n] zeros and ones -> int64: where the ones are."""
    if bits.device.type == "cpu":  # numpy's looks at eight at a time: a tenth of the time where they are few
        return torch.from_numpy(np.flatnonzero(bits.numpy().view(np.bool_)))
    return bits.nonzero().view(-1)


@dataclass(frozen=True)
class Lane:
    """Listed rows that this rank and its peers of one hop talk about in one direction.

    Their bits stand peer after peer, each peer's dim-group after dim-group, and are filled up to whole words.

    Attributes:
        spans: ``[peer][group]`` stretches of the entries, which are the rows of all directories one after another; or
            of ``chosen``.
        chosen: int32 [m] entries; None: all of them.
        told: are the bits sent? Otherwise nothing is filled up.
    """

    spans: list[list[Span]]
    chosen: torch.Tensor | None
    told: bool

    @cached_property
    def words(self) -> list[int]:
        """64-bit words of each peer."""
        return [-(-sum(end - first for first, end in of_peer) // _WORD_BITS) for of_peer in self.spans]

    @cached_property
    def _parts(self) -> list[tuple[Span, Span]]:
        """Of each peer and dim-group: the stretch, and where its bits are."""
        parts: list[tuple[Span, Span]] = []
        for start, of_peer in zip(accumulate(self.words, initial=0), self.spans, strict=False):
            at = start * _WORD_BITS if self.told else (parts[-1][1][1] if parts else 0)
            for first, end in of_peer:
                parts.append(((first, end), (at, at + end - first)))
                at += end - first
        return parts

    @property
    def _length(self) -> int:
        if self.told:
            return sum(self.words) * _WORD_BITS
        return self._parts[-1][1][1] if self._parts else 0

    def gather(self, entries: torch.Tensor) -> torch.Tensor:
        """uint8 [entries] -> uint8 [n] of the lane's rows."""
        of = entries if self.chosen is None else entries.index_select(0, self.chosen)
        bits = entries.new_zeros(self._length)
        for (first, end), (start, stop) in self._parts:
            if end > first:
                bits[start:stop] = of[first:end]
        return bits

    def mark(self, bits: torch.Tensor, entries: torch.Tensor) -> None:
        """Inverse of ``gather``: sets the ``entries`` whose bit is set for any peer."""
        into = entries if self.chosen is None else entries.new_zeros(len(self.chosen))
        for (first, end), (start, stop) in self._parts:
            if end > first:
                into[first:end] |= bits[start:stop]
        if self.chosen is not None:
            entries.scatter_reduce_(0, self.chosen.to(torch.int64), into, "amax")

    def counts(self, bits: torch.Tensor) -> torch.Tensor:
        """uint8 [n] -> int64 [peers x groups] ones of each part."""
        if bits.device.type == "cpu":  # a hundredth of the time of torch's sum
            ones = bits.numpy()
            return torch.tensor([np.count_nonzero(ones[start:stop]) for _, (start, stop) in self._parts])
        return torch.stack([bits[start:stop].sum(dtype=torch.int64) for _, (start, stop) in self._parts])

    def only(self, groups: Sequence[bool], bits: torch.Tensor) -> tuple[Lane, torch.Tensor]:
        """Of some dim-groups: such a lane, nothing filled up, and their part of its ``bits`` uint8 [n]."""
        spans = [
            [(first, end if keep else first) for keep, (first, end) in zip(groups, of_peer, strict=True)]
            for of_peer in self.spans
        ]
        kept = [bits[start:stop] for keep, (_, (start, stop)) in zip(cycle(groups), self._parts, strict=False) if keep]
        return Lane(spans, self.chosen, told=False), torch.cat(kept) if kept else bits[:0]

    def entries_of(self, bits: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """uint8 [n] with ``counts`` ones in each part -> int64 the entries whose bit is set, part after part."""
        shifts = torch.tensor([first - start for (first, _), (start, _) in self._parts], device=bits.device)
        at = positions_of(bits)
        of_parts = torch.tensor(list(counts), dtype=torch.int64, device=bits.device)
        at = at + shifts.repeat_interleave(of_parts, output_size=sum(counts))
        return at if self.chosen is None else self.chosen.index_select(0, at).to(torch.int64)


@dataclass(frozen=True)
class Listing:
    """The replicated rows of this rank, by the peers they are exchanged with.

    Attributes:
        out: per hop the rows whose home is reached over a peer: their gradients go there, their sums come from there.
        into: per hop the rows of which peers hold copies and this rank is the one to ask.
        shared: per hop the rows that all its peers hold, if it all-reduces: in the same order on each of them.
        firsts: where each dim-group begins in the directories one after another, and their end.
        exchanged: per hop, may any of its ranks list rows that are exchanged over it? Equal on all of them.
    """

    out: list[Lane]
    into: list[Lane]
    shared: list[Lane]
    firsts: list[int]
    exchanged: list[bool]

    @property
    def rows(self) -> int:
        return self.firsts[-1]

    @property
    def nbytes(self) -> int:
        """Nothing, unless direct exchange or mixed tiers of a rail need a list: 4 bytes for each of its rows then."""
        lists = [lane.chosen for lanes in (self.out, self.into, self.shared) for lane in lanes]
        return sum(chosen.nbytes for chosen in lists if chosen is not None)

    @staticmethod
    def of(stores: Sequence[GroupStore], hops: Sequence[Hop], layout: RankLayout) -> Listing:
        """Of the directories as they are now."""
        directories = [store.directory for store in stores]
        firsts = [0, *accumulate(len(directory) for directory in directories)]
        based = list(zip(directories, firsts, strict=False))
        out, into, common, exchanged = [], [], [], []
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
            out.append(
                Lane(
                    [
                        [_span(d, first, away[p] if p != hop.peers.index else []) for d, first in based]
                        for p in range(hop.peers.size)
                    ],
                    None,
                    told=True,
                )
            )
            into.append(_into(based, hop, mine, on_my_rail))
            own = [home for home in homes.tolist() if home % layout.local_ranks == local] if hop.all_reduces else []
            common.append(Lane([[_span(directory, first, own) for directory, first in based]], None, told=False))
            # On a rail, and inside a node, ranks have rows in common or none; what other rails list a rank cannot see.
            alike = all(on_my_rail) or not any(hop.peers.far)
            exchanged.append(not alike or any(out[-1].words) or any(into[-1].words))
        return Listing(out, into, common, firsts, exchanged)


def _span(directory: Directory, base: int, homes: Sequence[int]) -> Span:
    """The rows of some home ranks, which stand side by side."""
    if not homes:
        return base, base
    places = sorted(directory.order.place_of(home) for home in homes)
    assert places[-1] - places[0] + 1 == len(places)  # noqa: S101
    return base + directory.bounds[places[0]], base + directory.bounds[places[-1] + 1]


def _into(based: Sequence[tuple[Directory, int]], hop: Hop, mine: Sequence[int], on_my_rail: Sequence[bool]) -> Lane:
    """Of the rows of the homes ``mine`` that each peer holds: all of them on this rank's rail, else the DEVICE rows."""
    others = [p for p in range(hop.peers.size) if p != hop.peers.index]
    whole = [_span(directory, base, mine) for directory, base in based]
    several = any(directory.rail_device is not None for directory, _ in based)
    if not several or all(on_my_rail[p] for p in others):
        return Lane([whole if p in others else [(0, 0)] * len(based) for p in range(hop.peers.size)], None, told=True)
    # Both lists stand in ``chosen``, all rows first.
    alls: list[Span] = []
    devices: list[Span] = []
    lists, at = [], 0
    device = based[0][0].codes.device
    for wanted, spans in ((any(on_my_rail[p] for p in others), alls), (True, devices)):
        for (directory, base), (first, end) in zip(based, whole, strict=True):
            part = torch.arange(first, end if wanted else first, dtype=torch.int32, device=device)
            if spans is devices and directory.rail_device is not None:
                rows = directory.rail_device
                inside = torch.searchsorted(rows, torch.tensor([first - base, end - base], device=device)).tolist()
                part = rows[inside[0] : inside[1]] + base
            lists.append(part)
            spans.append((at, at + len(part)))
            at += len(part)
    nothing = [(0, 0)] * len(based)
    of_peers = [nothing if p not in others else alls if on_my_rail[p] else devices for p in range(hop.peers.size)]
    return Lane(of_peers, torch.cat(lists), told=True)
