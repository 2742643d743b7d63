"""Sums of the gradients of replicated rows, over all ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch

from flexd.embedding import devices
from flexd.embedding.exchange.collectives import TrafficKind
from flexd.embedding.exchange.column import Column, ReceivedRows, add_columns, copy_columns
from flexd.embedding.exchange.hop import Hop
from flexd.embedding.exchange.route import StationRows
from flexd.embedding.replicas.touched_rows import RowBits, SyncList, SyncLists, TouchedRows, entries_at, positions_of
from flexd.embedding.store.directory import Directory
from flexd.embedding.store.entry_pool import BLOCK

Part = list[tuple[torch.Tensor, list[int]]]
"""Of each dim-group: rows, and how many of each peer."""


@dataclass(frozen=True)
class SumLists:
    """Lists of the rows whose gradients are exchanged. What depends on the lists alone is made once.

    A *part* is the rows of a list, a dim-group and a peer; parts are numbered in this order.

    Attributes:
        peers: number of peers of each list.
        groups: number of dim-groups.
        blocks: int64 [words] block of each word of all lists.
        part_of_word: [words] the part of each word; the number of parts if its rows are left out.
    """

    peers: list[int]
    groups: int
    blocks: torch.Tensor
    part_of_word: npt.NDArray[np.int32]

    @staticmethod
    def of(lists: Sequence[tuple[SyncList, Sequence[bool]]]) -> SumLists:
        """Make them of lists with the dim-groups of each that are kept."""
        groups = len(lists[0][1])
        peers = [len(rows.blocks) for rows, _ in lists]
        numbers = []
        first = 0
        for rows, kept in lists:
            widths = [len(of_group) for of_peer in rows.blocks for of_group in of_peer]
            part = first + np.arange(groups) * len(rows.blocks) + np.arange(len(rows.blocks))[:, None]
            numbers.append(np.repeat(np.where(kept, part, groups * sum(peers)).ravel(), widths))
            first += groups * len(rows.blocks)
        return SumLists(
            peers, groups, torch.cat([rows.index for rows, _ in lists]), np.concatenate(numbers).astype(np.int32)
        )

    @property
    def number_of_parts(self) -> int:
        """Number of parts."""
        return self.groups * sum(self.peers)

    @cached_property
    def _ordered(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """On the device, of the kept words part by part: int64 number, block and part of each."""
        order = np.argsort(self.part_of_word, kind="stable")
        order = order[: np.count_nonzero(self.part_of_word < self.number_of_parts)].astype(np.int64)
        number = torch.from_numpy(order).to(self.blocks.device)
        part = torch.from_numpy(self.part_of_word[order].astype(np.int64)).to(self.blocks.device)
        return number, self.blocks.index_select(0, number), part

    def ordered_bits(self, bits: Sequence[RowBits]) -> tuple[torch.Tensor, torch.Tensor]:
        """Order the bits of the lists part by part: (uint8 [kept words, 64] bits, int64 [parts] numbers of ones).

        Args:
            bits: of each list, in the order of its words.
        """
        number, _, part = self._ordered
        ordered = torch.cat(list(bits)).view(-1, BLOCK).index_select(0, number)
        ones = ordered.sum(dim=1)
        return ordered, ones.new_zeros(self.number_of_parts).index_add_(0, part, ones)

    def touched(self, ordered: torch.Tensor, total: int) -> torch.Tensor:
        """Return int64 [total] entries of the ones, whose number the host has read, in ordered bits."""
        # ``nonzero`` would wait for the number once more.
        at = torch.nonzero_static(ordered.view(-1), size=total).view(-1)
        return entries_at(self._ordered[1], at)

    def by_part(self, places: torch.Tensor, counts: Sequence[int]) -> list[Part]:
        """Split int64 [n] places, part by part: of each list its rows."""
        of_peers: list[list[int]] = []
        first = 0
        for peers in self.peers:
            for end in range(first + peers, first + (self.groups + 1) * peers, peers):
                of_peers.append(list(counts[end - peers : end]))
            first += self.groups * peers
        rows = places.split_with_sizes([sum(of_group) for of_group in of_peers])
        parts = list(zip(rows, of_peers, strict=True))
        return [parts[i : i + self.groups] for i in range(0, len(parts), self.groups)]


class ReplicaSums:
    """Gradients of the replicated rows that a step touched: those of this rank at first, then the sums over all ranks.

    ``Router.push`` calls ``start``, then for each station ``add`` of each dim-group, ``up`` and ``recv_up`` of its hop.

    Args:
        touched: complete. The host waits for the device twice: for the number of touched rows, and for all sizes.
        listed: the rows that this rank lists.
        dims, wire, wide: of each dim-group; gradients travel in ``wire`` and are added in ``wide``.
        all_reduced: for each hop, whether it all-reduces the dim-groups that lose nothing by it.
        lists: ``sum_lists`` of the lists of ``touched``.
        numbers: of the device.
    """

    def __init__(
        self,
        touched: TouchedRows,
        listed: Directory,
        dims: Sequence[int],
        wire: Sequence[torch.dtype],
        wide: Sequence[torch.dtype],
        all_reduced: Sequence[bool],
        lists: SumLists,
        numbers: devices.Numbers,
    ) -> None:
        self._touched = touched
        self._wire, self._wide = list(wire), list(wide)
        self._groups = len(dims)
        self._reducible = _reducible(wire, wide)
        self._all_reduced = list(all_reduced)
        self._rows = positions_of(touched.entries, 0, touched.lists.rows // BLOCK)
        bits = [part for hop in range(len(all_reduced)) for part in self._bits(hop)]
        # NODE rows of a dim-group have entries of their own before its DEVICE rows.
        tier = torch.searchsorted(devices.uploaded(listed.starts[1:-1], self._rows.device), self._rows, right=True)
        order, sections = devices.ordered(tier, 2 * self._groups)
        ordered, ones = lists.ordered_bits(bits)
        numbers_read = torch.cat([sections, ones]).tolist()
        sizes, counts = numbers_read[: len(sections)], numbers_read[len(sections) :]
        entries = lists.touched(ordered, sum(counts))
        self._starts = [0, *accumulate(a + b for a, b in zip(sizes[::2], sizes[1::2], strict=True))]
        # Only the places of touched rows are written and read. A search among these rows would take longer.
        self._number_of_entry = self._rows.new_empty(touched.lists.rows + 1)
        self._number_of_entry.index_copy_(0, self._rows, self._numbered(order, tier, numbers.first(len(order))))
        self._node_rows = sizes[::2]
        self._slots_by_tier = listed.slots_at(self._rows.index_select(0, order)).split_with_sizes(sizes)
        shapes = [(end - start, dim) for (start, end), dim in zip(pairwise(self._starts), dims, strict=True)]
        self.sums = devices.zeros(shapes, wide, order.device)
        self._parts = lists.by_part(self._places(entries), counts)
        """Per hop the five lists; of each, per dim-group the rows of ``sums`` and how many of each peer."""
        self._held: list[list[torch.Tensor]] = []
        """``[station][group]``: the rows of ``sums`` of the replicated rows held at the station."""

    def _numbered(self, order: torch.Tensor, tier: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Return int64 [touched rows]: the row of each in the ``sums`` of its dim-group, NODE rows first.

        Args:
            number: int64 [touched rows] 0, 1, 2 ...
        """
        numbers = torch.empty_like(number).scatter_(0, order, number)
        if self._groups > 1:
            starts = devices.uploaded([start for start in self._starts[:-1] for _ in range(2)], order.device)
            numbers -= starts.index_select(0, tier)
        return numbers

    def start(self, stations: Sequence[Sequence[StationRows]]) -> None:
        """Begin with the ``[station][group]`` rows of a route."""
        entries = [rows.entries[rows.plain :] for of_station in stations for rows in of_station]
        places = self._places(torch.cat(entries)).split_with_sizes([part.shape[0] for part in entries])
        self._held = [list(places[first : first + self._groups]) for first in range(0, len(places), self._groups)]

    def add(self, station: int, group: int, rows: StationRows, grads: torch.Tensor) -> None:
        """Add [held, dim] gradients of the rows of a dim-group that are held at a station."""
        places = self._held[station][group]
        if places.shape[0]:
            self.sums[group].index_add_(0, places, grads[rows.plain :])

    def up(self, hop: int) -> list[Column]:
        """Return the columns that travel with the gradients over a hop."""
        columns = self._columns(hop, _UP_SENT, _UP_RECEIVED)
        return columns if any(any(column.sent) or any(column.received) for column in columns) else []

    def recv_up(self, hop: int, arrived: Sequence[ReceivedRows]) -> None:
        """Receive the rows of each column of ``up``."""
        if not arrived:
            return
        received = self._parts[_LISTS * hop + _UP_RECEIVED]
        several = [sum(count > 0 for count in rows.counts) > 1 for rows in arrived]
        shapes = [(len(s) if many else 0, s.shape[1]) for s, many in zip(self.sums, several, strict=True)]
        totals = devices.zeros(shapes, self._wide, self._rows.device)
        # Received gradients are added up before they join those of this rank: as ``Router`` adds them.
        targets = [total if many else sums for sums, total, many in zip(self.sums, totals, several, strict=True)]
        add_columns(arrived, targets, [places for places, _ in received])
        both = [(sums, total) for sums, total, many in zip(self.sums, totals, several, strict=True) if many]
        if both:
            torch._foreach_add_([sums for sums, _ in both], [total for _, total in both])

    def spread(self, hops: Sequence[Hop]) -> None:
        """Collective. Give every holder the sum, rounded to the wire's dtype on all of them."""
        self.sums = [sums.to(wire).to(sums.dtype) for sums, wire in zip(self.sums, self._wire, strict=True)]
        for hop in reversed(range(len(hops))):
            if self._all_reduced[hop]:
                self._all_reduce(hops[hop], [part for part, _ in self._parts[_LISTS * hop + _REDUCED]])
                if all(self._reducible):
                    continue
            if not self._touched.lists.used[hop]:
                continue
            arrived = hops[hop].exchange(self._columns(hop, _DOWN_SENT, _DOWN_RECEIVED))
            received = self._parts[_LISTS * hop + _DOWN_RECEIVED]
            copy_columns(arrived, self.sums, [places for places, _ in received])

    def by_tier(self, group: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (int64 [n] slots, [n, dim] sums) of the touched rows of a dim-group: at NODE, at DEVICE."""
        at_node = self._node_rows[group]
        of_tiers = self.sums[group][:at_node], self.sums[group][at_node:]
        return list(zip(self._slots_by_tier[2 * group : 2 * group + 2], of_tiers, strict=True))

    def _bits(self, hop: int) -> list[RowBits]:
        """Return the touched bits of the five lists of a hop."""
        touched = self._touched
        received, sent = touched.down_received[hop], touched.down_sent[hop]
        if received is None or sent is None:
            raise AssertionError("the union of touched rows is not known")
        reduced = touched.lists.reduced[hop].gather(touched.entries)
        return [touched.up_sent[hop], touched.up_received[hop], received, sent, reduced]

    def _places(self, entries: torch.Tensor) -> torch.Tensor:
        """int64 [n] touched entries -> int64 [n] rows of the ``sums`` of their dim-groups."""
        return self._number_of_entry.index_select(0, entries)

    def _all_reduce(self, hop: Hop, rows: Sequence[torch.Tensor]) -> None:
        """All-reduce int64 ``rows[group]`` of ``sums``: one collective for all dim-groups of a dtype."""
        for dtype in sorted({sums.dtype for sums in self.sums}, key=str):
            groups = [g for g, sums in enumerate(self.sums) if self._reducible[g] and sums.dtype == dtype]
            parts = [self.sums[g].index_select(0, rows[g]).view(-1) for g in groups]
            if not parts:
                continue
            flat = torch.cat(parts)
            hop.peers.all_reduce(flat, kind=TrafficKind.SYNC)
            for g, part in zip(groups, flat.split_with_sizes([len(part) for part in parts]), strict=True):
                self.sums[g].index_copy_(0, rows[g], part.view(-1, self.sums[g].shape[1]))

    def _columns(self, hop: int, sent: int, received: int) -> list[Column]:
        sent_parts, received_parts = self._parts[_LISTS * hop + sent], self._parts[_LISTS * hop + received]
        return [
            Column(sums, rows, counts, back, wire, TrafficKind.SYNC, added=received == _UP_RECEIVED)
            for sums, wire, (rows, counts), (_, back) in zip(
                self.sums, self._wire, sent_parts, received_parts, strict=True
            )
        ]


def _reducible(wire: Sequence[torch.dtype], wide: Sequence[torch.dtype]) -> list[bool]:
    """Return for each dim-group whether an all-reduce in the dtype of the wire loses nothing."""
    return [a == b for a, b in zip(wire, wide, strict=True)]


def sum_lists(
    lists: SyncLists, all_reduced: Sequence[bool], wire: Sequence[torch.dtype], wide: Sequence[torch.dtype]
) -> SumLists:
    """Return the lists of all hops. Rows that are all-reduced are left out of the lists of what is sent.

    Args:
        all_reduced: for each hop, whether it all-reduces the dim-groups that lose nothing by it.
        wire, wide: dtypes of each dim-group, as in ``ReplicaSums``.
    """
    reducible = _reducible(wire, wide)
    of_hops = []
    for hop, reduces in enumerate(all_reduced):
        upstream, downstream = lists.upstream[hop], lists.downstream[hop]
        sent = [not (reduces and lossless) for lossless in reducible]
        everything = [True] * len(reducible)
        of_hops += [(rows, sent) for rows in (upstream, downstream, upstream, downstream)]
        of_hops.append((lists.reduced[hop], everything))
    return SumLists.of(of_hops)


_UP_SENT, _UP_RECEIVED, _DOWN_RECEIVED, _DOWN_SENT, _REDUCED = range(5)
_LISTS = 5
"""Lists of each hop, as in ``sum_lists``: gradients sent up and received, sums received from above and sent down,
rows all-reduced."""
