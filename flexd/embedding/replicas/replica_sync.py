"""Gradients of replicated rows on their way to the other copies, as one and the same sum.

They take the hops that requests take, and travel with what is sent there anyway. Which rows are touched is told with
the ids of the forward pass, the union comes back with the rows, one bit a listed row::

    up      every rank sends what it has to the node owner, which adds it to its own
    across  the owners of a rail, which all hold the row, all-reduce the rows of the union
    down    the owner tells the sum to the ranks of its node that hold the row

An all-reduce adds in the dtype that travels. Where that is narrower than what gradients are added in, the owners send
what they have to the home instead, and the home tells them the sum: a row's gradient is rounded and added in the same
places then, whatever its tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from flexd.core.layout import Tier
from flexd.embedding.exchange.hop import Column, Hop, Note
from flexd.embedding.exchange.sent_bytes import Kind
from flexd.embedding.replicas.listing import Lane, Listing, positions_of


class Touched:
    """Which listed rows the passes of a step read, here and, once all hops have told, anywhere.

    Stations are told in order: ``add`` of station 0, ``up`` and ``told_up`` of hop 0, ``add`` of station 1, and so on;
    then ``down`` and ``told_down`` from the last hop to the first.
    """

    def __init__(self, listing: Listing, device: torch.device) -> None:
        self.listing = listing
        self.entries = torch.zeros(listing.rows + 1, dtype=torch.uint8, device=device)
        """uint8 [listed rows + 1], of all directories; the last is the entry that does not exist."""
        self.up_out: list[torch.Tensor] = []
        self.up_in: list[torch.Tensor] = []
        self.down_out: list[torch.Tensor | None] = [None] * len(listing.out)
        self.down_in: list[torch.Tensor | None] = [None] * len(listing.out)

    def add(self, group: int, entries: torch.Tensor) -> None:
        """int64 [n] directory positions of a dim-group, -1 for plain home rows."""
        nothing = self.listing.rows
        at = torch.where(entries < 0, nothing, entries + self.listing.firsts[group])
        self.entries.index_fill_(0, at, 1)
        self.entries[nothing] = 0

    def up(self, hop: int) -> Note:
        out, into = self.listing.out[hop], self.listing.into[hop]
        bits = out.gather(self.entries)
        self.up_out.append(bits)
        return Note(_packed(bits), out.words, into.words)

    def told_up(self, hop: int, words: torch.Tensor) -> None:
        bits = _unpacked(words)
        self.up_in.append(bits)
        self.listing.into[hop].mark(bits, self.entries)

    def down(self, hop: int) -> Note:
        out, into = self.listing.out[hop], self.listing.into[hop]
        bits = into.gather(self.entries)
        self.down_in[hop] = bits
        return Note(_packed(bits), into.words, out.words)

    def told_down(self, hop: int, words: torch.Tensor) -> None:
        bits = _unpacked(words)
        self.down_out[hop] = bits
        self.listing.out[hop].mark(bits, self.entries)

    @property
    def known_everywhere(self) -> bool:
        return all(bits is not None for bits in self.down_out)

    @staticmethod
    def together(parts: Sequence[Touched]) -> Touched:
        """Of several passes over one placement."""
        if len(parts) == 1:
            return parts[0]
        whole = Touched(parts[0].listing, parts[0].entries.device)
        whole.entries = _union([part.entries for part in parts])
        for hop in range(len(whole.down_out)):
            whole.up_out.append(_union([part.up_out[hop] for part in parts]))
            whole.up_in.append(_union([part.up_in[hop] for part in parts]))
            if all(part.known_everywhere for part in parts):
                whole.down_out[hop] = _union([bits for part in parts if (bits := part.down_out[hop]) is not None])
                whole.down_in[hop] = _union([bits for part in parts if (bits := part.down_in[hop]) is not None])
        return whole

    def positions(self, group: int) -> torch.Tensor:
        """int64: the touched rows of a dim-group's directory."""
        first, end = self.listing.firsts[group : group + 2]
        return positions_of(self.entries[first:end])

    def all_positions(self) -> torch.Tensor:
        """int64: the touched rows of all directories one after another."""
        return positions_of(self.entries[: self.listing.rows])

    def divide(self, other: Touched) -> tuple[Touched, Touched]:
        """Both known everywhere, of one placement -> the rows that are in both, and those in this one alone."""
        return self._only(other.entries), self._only(1 - other.entries)

    def _only(self, entries: torch.Tensor) -> Touched:
        part = Touched(self.listing, entries.device)
        part.entries = self.entries & entries
        for hop, (out, into) in enumerate(zip(self.listing.out, self.listing.into, strict=True)):
            of_out, of_into = out.gather(entries), into.gather(entries)
            part.up_out.append(self.up_out[hop] & of_out)
            part.up_in.append(self.up_in[hop] & of_into)
            down_out, down_in = self.down_out[hop], self.down_in[hop]
            part.down_out[hop] = None if down_out is None else down_out & of_out
            part.down_in[hop] = None if down_in is None else down_in & of_into
        return part


def _union(bits: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(bits)).amax(dim=0)


def _weights(device: torch.device) -> torch.Tensor:
    return 2 ** torch.arange(8, dtype=torch.uint8, device=device)


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """uint8 [64 n] zeros and ones -> int64 [n]."""
    if bits.device.type == "cpu":  # a twentieth of the time
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little").view(np.int64))
    return (bits.view(-1, 8) * _weights(bits.device)).sum(dim=1, dtype=torch.uint8).view(torch.int64)


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    if words.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(words.numpy().view(np.uint8), bitorder="little"))
    return (words.view(torch.uint8).unsqueeze(1) & _weights(words.device)).ne(0).view(-1).to(torch.uint8)


class ReplicaSums:
    """Gradients of the replicated rows that a step touched: this rank's at first, at last the sums over all ranks.

    Args:
        touched: known everywhere. One transfer to the host tells all sizes.
        dims, wire, wide: of each dim-group; gradients travel in ``wire`` and are added in ``wide``.
        all_reduced: is there an all-reduce over each hop, for the dim-groups that lose nothing in it?
    """

    def __init__(
        self,
        touched: Touched,
        dims: Sequence[int],
        wire: Sequence[torch.dtype],
        wide: Sequence[torch.dtype],
        all_reduced: Sequence[bool],
    ) -> None:
        self._touched = touched
        self._wire = list(wire)
        self._groups = len(dims)
        self._reducible = [a == b for a, b in zip(wire, wide, strict=True)]
        self._all_reduced = list(all_reduced)
        self._firsts = touched.listing.firsts
        lanes = [lane for hop, reduces in enumerate(all_reduced) for lane in self._lanes(hop, reduces=reduces)]
        self._rows = touched.all_positions()
        firsts = torch.tensor(self._firsts, device=self._rows.device)
        bounds = torch.searchsorted(self._rows, firsts)
        numbers = torch.cat([bounds, *(lane.counts(bits).to(bounds.device) for lane, bits in lanes)]).tolist()
        self._starts, counts = numbers[: self._groups + 1], numbers[self._groups + 1 :]
        self.sums = [
            torch.zeros((end - start, dim), dtype=dtype, device=bounds.device)
            for (start, end), dim, dtype in zip(pairwise(self._starts), dims, wide, strict=True)
        ]
        self._parts: list[list[tuple[torch.Tensor, list[int]]]] = []
        """Per hop the five lanes; of each, per dim-group the rows of ``sums`` and how many of each peer."""
        for lane, bits in lanes:
            size = len(lane.spans) * self._groups
            if not len(bits):
                counts = counts[size:]
                self._parts.append([(self._rows[:0], [0] * len(lane.spans))] * self._groups)
                continue
            of_lane, counts = counts[:size], counts[size:]
            pieces = torch.split(self._places(lane.entries_of(bits, of_lane)), of_lane)
            self._parts.append(
                [
                    (torch.cat(pieces[g :: self._groups]) - self._starts[g], of_lane[g :: self._groups])
                    for g in range(self._groups)
                ]
            )

    def _lanes(self, hop: int, *, reduces: bool) -> list[tuple[Lane, torch.Tensor]]:
        """Of a hop, each with uint8 which of its rows are touched. What is all-reduced is not sent besides."""
        listing, touched = self._touched.listing, self._touched
        down_out, down_in = touched.down_out[hop], touched.down_in[hop]
        if down_out is None or down_in is None:
            raise AssertionError("the union of touched rows is not known")
        shared = listing.shared[hop]
        lanes = [
            (listing.out[hop], touched.up_out[hop]),
            (listing.into[hop], touched.up_in[hop]),
            (listing.out[hop], down_out),
            (listing.into[hop], down_in),
        ]
        if reduces:
            sent = [not reducible for reducible in self._reducible]
            lanes = [lane.only(sent, bits) for lane, bits in lanes]
        return [*lanes, (shared, shared.gather(touched.entries))]

    def _places(self, entries: torch.Tensor) -> torch.Tensor:
        """int64 [n] touched entries -> int64 [n] places among all that are touched."""
        return torch.searchsorted(self._rows, entries)

    def land(self, group: int, entries: torch.Tensor, grads: torch.Tensor) -> None:
        """Adds [n, dim] gradients that this rank holds, of int64 [n] directory positions (-1: no replica, left out)."""
        at = (entries >= 0).nonzero().view(-1)
        rows = self._places(entries.index_select(0, at) + self._firsts[group]) - self._starts[group]
        self.sums[group].index_add_(0, rows, grads.index_select(0, at))

    def up(self, hop: int) -> list[Column]:
        """What goes up over a hop, once all that this rank holds up to its station has landed; nothing, if nothing goes
        nor comes."""
        columns = self._columns(hop, _UP_OUT, _UP_IN)
        return columns if any(any(column.sent) or any(column.received) for column in columns) else []

    def came_up(self, hop: int, arrived: Sequence[Sequence[torch.Tensor]]) -> None:
        """``arrived``: of each column of ``up``."""
        if not arrived:
            return
        for sums, parts, (rows, counts) in zip(self.sums, arrived, self._parts[_LANES * hop + _UP_IN], strict=True):
            for part, at in zip(parts, torch.split(rows, counts), strict=True):
                if len(part):
                    sums.index_add_(0, at, part.to(sums.dtype))

    def spread(self, hops: Sequence[Hop]) -> None:
        """Collective. Gives all holders the sum; every copy the sum as it travels."""
        self.sums = [sums.to(wire).to(sums.dtype) for sums, wire in zip(self.sums, self._wire, strict=True)]
        for hop in reversed(range(len(hops))):
            if self._all_reduced[hop]:
                self._all_reduce(hops[hop], [part for part, _ in self._parts[_LANES * hop + _SHARED]])
                if all(self._reducible):
                    continue
            if not self._touched.listing.exchanged[hop]:
                continue
            arrived = hops[hop].exchange(self._columns(hop, _DOWN_IN, _DOWN_OUT))
            for sums, parts, (rows, counts) in zip(
                self.sums, arrived, self._parts[_LANES * hop + _DOWN_OUT], strict=True
            ):
                for part, at in zip(parts, torch.split(rows, counts), strict=True):
                    if len(part):
                        sums.index_copy_(0, at, part.to(sums.dtype))

    def _all_reduce(self, hop: Hop, rows: Sequence[torch.Tensor]) -> None:
        """One collective for all dim-groups of a dtype. ``rows[group]`` int64 of ``sums``."""
        for dtype in sorted({sums.dtype for sums in self.sums}, key=str):
            groups = [g for g, sums in enumerate(self.sums) if self._reducible[g] and sums.dtype == dtype]
            parts = [self.sums[g].index_select(0, rows[g]).view(-1) for g in groups]
            if not parts:
                continue
            flat = torch.cat(parts)
            hop.peers.all_reduce(flat, kind=Kind.SYNC)
            for g, part in zip(groups, torch.split(flat, [len(part) for part in parts]), strict=True):
                self.sums[g].index_copy_(0, rows[g], part.view(-1, self.sums[g].shape[1]))

    def at(self, group: int, tiers: torch.Tensor, tier: Tier) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 tiers of the touched rows of a dim-group -> (int64 [m] places of those at ``tier`` among them, [m, dim]
        their sums)."""
        chosen = (tiers == tier).nonzero().view(-1)
        return chosen, self.sums[group].index_select(0, chosen)

    def _columns(self, hop: int, sent: int, received: int) -> list[Column]:
        return [
            Column(sums, rows, counts, back, wire, Kind.SYNC)
            for sums, wire, (rows, counts), (_, back) in zip(
                self.sums, self._wire, self._parts[_LANES * hop + sent], self._parts[_LANES * hop + received],
                strict=True,
            )
        ]  # fmt: skip


_UP_OUT, _UP_IN, _DOWN_OUT, _DOWN_IN, _SHARED = range(5)
_LANES = 5
"""Of each hop: who is told what goes up and what comes, the same two for what goes down, and what is all-reduced."""
