"""Sums the gradients of a step on every rank that holds a row, and updates the rows.

Gradients of replicated rows take the hops of the requests and travel in the same messages. Which rows are touched is
known before (``TouchedRows``)::

    up      every rank sends its gradients to the node owner, which adds them to its own
    across  the owners of a rail, which all hold the row, all-reduce the rows of the union
    down    the owner sends the sum to the ranks of its node that hold the row

An all-reduce adds in the dtype of the wire. Where that is narrower than the dtype in which gradients are added, the
owners send their gradients to the home instead, and the home sends back the sum: a row's gradient is rounded and added
in the same places then, at every tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from flexd.core.placement import RankLayout
from flexd.core.step_phases import StepPhase
from flexd.embedding import devices
from flexd.embedding.exchange.calls import in_phase
from flexd.embedding.exchange.collectives import TrafficKind
from flexd.embedding.exchange.column import Column, ReceivedRows, add_columns, copy_columns
from flexd.embedding.exchange.hop import Hop, PeerWords
from flexd.embedding.exchange.route import Dedup, Route, StationRows
from flexd.embedding.exchange.router import Router, merge_passes
from flexd.embedding.replicas.touched_rows import RowBits, SyncList, SyncLists, TouchedRows, entries_at, positions_of
from flexd.embedding.row_optimizers import GroupUpdate, RowUpdate
from flexd.embedding.store.directory import BLOCK, Directory
from flexd.embedding.store.store import GroupStore

if TYPE_CHECKING:
    from flexd.embedding.store.slow.tiered_rows import TieredRows


@dataclass(frozen=True)
class RowGradients:
    """Gradients of one step, summed over all ranks. Equal rows in equal order on every rank that holds them.

    Attributes:
        group: the dim-group.
        slots: int64 [n], unique.
        grads: [n, dim], in the dtype in which gradients are added (``Router.wide``).
        sole: no other rank holds any of the rows.
    """

    group: int
    slots: torch.Tensor
    grads: torch.Tensor
    sole: bool = False


class ReplicaSync:
    """Sums gradients over all ranks through a ``Router``, and updates the rows that this rank holds.

    Args:
        changed: as ``StepMoments.changed``, of the rows that are about to be updated.
    """

    def __init__(
        self,
        stores: Sequence[GroupStore],
        router: Router,
        layout: RankLayout,
        changed: Callable[..., None] | None = None,
    ) -> None:
        self._stores = list(stores)
        self._changed = changed
        self._router, self.phases = router, router.phases
        self._layout = layout
        # Number of slots of the dim-groups before each, and of all.
        self._first_slots = [0, *accumulate(store.home_rows + store.replica_slots for store in self._stores)]
        self._numbers = devices.Numbers(self._stores[0].rows.device)
        self._dedup = Dedup(0, self._first_slots[-1], self._stores[0].rows.device, self._numbers)
        self._lists: SyncLists | None = None
        # Those of the last step, and what was made of them.
        self._sum_lists: tuple[SyncLists, SumLists] | None = None
        self._blocks_version = -1
        self._hops = router.hops

    def new_touched(self) -> TouchedRows | None:
        """Return what collects the replicated rows that a pass touches; None if no hop has any. Equal on all ranks."""
        directory = self._stores[0].directory
        if self._router.hops is not self._hops:
            self._lists, self._hops = None, self._router.hops
        if self._lists is None or directory.blocks_version != self._blocks_version:
            trained = [store.group.trained for store in self._stores]
            self._lists = SyncLists.of(directory, self._router.hops, self._layout, trained)
            self._blocks_version = directory.blocks_version
        return TouchedRows(self._lists, self._stores[0].rows.device) if any(self._lists.used) else None

    @in_phase(StepPhase.SYNC)
    def agree(self, passes: Sequence[tuple[Route, TouchedRows | None]]) -> TouchedRows | None:
        """Collective. Unite the replicated rows that any rank has touched in any pass; None if there can be none.

        Bits that did not travel with the ids and rows of the passes travel now.
        """
        if self.new_touched() is None:
            return None
        parts = [touched if touched is not None else self._send_up(route) for route, touched in passes]
        whole = TouchedRows.union(parts)
        if not whole.complete:
            for hop in reversed(range(len(self._router.hops))):
                whole.recv_down(hop, self._exchange_words(whole, hop, whole.down(hop)))
        return whole

    @in_phase(StepPhase.PUSH)
    def push(
        self, passes: Sequence[tuple[Route, Sequence[torch.Tensor]]], touched: TouchedRows | None
    ) -> list[RowGradients]:
        """Collective. Carry the gradients of a step's passes to their rows, each row's once.

        Args:
            passes: routes, and per dim-group [rows of the first station, dim] gradients.
            touched: the replicated rows that any rank has gradients of; None if there are none.

        Returns:
            The gradients of all rows that this rank holds and any rank touched: of plain home rows, then of replicated
            rows.
        """
        router = self._router
        replicas = None
        if touched is not None:
            dims = [store.group.dim for store in self._stores]
            all_reduced = [hop.all_reduces for hop in router.hops]
            lists = self._lists_of_sums(touched.lists, all_reduced)
            replicas = ReplicaSums(
                touched, self._stores[0].directory, dims, router.wire, router.wide, all_reduced, lists, self._numbers
            )
        held = router.push(*merge_passes(router, passes), replicas)
        summed = self._sum_plain(held)
        if replicas is not None and touched is not None:
            with self.phases.phase(StepPhase.SYNC):
                replicas.spread(router.hops)
            summed += [RowGradients(g, *of_tier) for g in range(len(dims)) for of_tier in replicas.by_tier(g)]
        return summed

    @in_phase(StepPhase.UPDATE)
    def update(self, summed: Sequence[RowGradients], optimizer: RowUpdate, step: int) -> None:
        """Update the rows. ``step``: as in ``RowOptimizer.update_groups``."""
        if self._changed is not None:
            self._changed([(part.group, part.slots) for part in summed], all_rows=optimizer.moves_all_rows)
        # One part a tier and group has the same rows in the same order on every holder: bit-equal by construction.
        groups = []
        for g, store in enumerate(self._stores):
            if not store.group.trained:
                continue
            parts = [(part.slots, part.grads) for part in summed if part.group == g]
            if store.tier is not None:
                _update_tier(store.tier, store, parts, optimizer, step)
            elif isinstance(store.rows, torch.Tensor) and isinstance(store.state, torch.Tensor):
                name = store.group.optimizer
                groups.append(GroupUpdate(store.rows, store.state, parts, store.keys_at, optimizer=name))
        optimizer.update_groups(groups, step)

    def _send_up(self, route: Route) -> TouchedRows:
        touched = self.new_touched()
        if touched is None:
            raise AssertionError("no replicas")
        for station, at_station in enumerate(route.stations):
            for rows in at_station:
                touched.add(rows.entries)
            if station < len(self._router.hops):
                touched.recv_up(station, self._exchange_words(touched, station, touched.up(station)))
        return touched

    def _exchange_words(self, touched: TouchedRows, hop: int, words: PeerWords) -> torch.Tensor:
        """Collective over a hop if any of its ranks lists rows: ranks of other hops may list none at all."""
        if not touched.lists.used[hop]:
            return words.words
        peers = self._router.hops[hop].peers
        return peers.all_to_all(words.words, words.sent, words.received, {TrafficKind.SYNC: words.sent})

    def _lists_of_sums(self, lists: SyncLists, all_reduced: Sequence[bool]) -> SumLists:
        if self._sum_lists is None or self._sum_lists[0] is not lists:
            self._sum_lists = lists, SumLists.of(lists, all_reduced, self._router.wire, self._router.wide)
        return self._sum_lists[1]

    def _sum_plain(self, held: Sequence[Sequence[tuple[StationRows, torch.Tensor]]]) -> list[RowGradients]:
        """Sum the gradients of plain home rows, and of those that have moved here, over the stations, by dim-group.

        Gradients of this rank arrive at the first station, those of other ranks at later ones.
        """
        groups = range(len(self._stores))
        sizes = [[rows.plain for rows, _ in held[g]] for g in groups]
        numbers = [sum(of_group) for of_group in sizes]
        slots = torch.cat([rows.slots[: rows.plain] for g in groups for rows, _ in held[g]])
        if len(groups) > 1:
            both = devices.uploaded([self._first_slots[:-1], numbers], slots.device)
            of_slots = torch.repeat_interleave(both[1], output_size=len(slots))
            slots = slots + both[0].index_select(0, of_slots)
        distinct, places = self._dedup.unique(slots)
        if len(groups) > 1:
            bounds = devices.uploaded(self._first_slots, slots.device)
            of_distinct = torch.searchsorted(bounds[1:-1], distinct, right=True)
            distinct = distinct - bounds.index_select(0, of_distinct)
            if places is not None:
                counts = devices.sum_by_place(of_distinct, None, len(groups))
                starts = counts.cumsum(0) - counts
                places = places - starts.index_select(0, of_slots)
                numbers_distinct = counts.tolist()
            else:
                numbers_distinct = numbers
        else:
            numbers_distinct = [len(distinct)]
        of_places = [None] * len(groups) if places is None else places.split_with_sizes(numbers)
        shapes = [
            (0 if places is None else number, store.group.dim)
            for number, store in zip(numbers_distinct, self._stores, strict=True)
        ]
        totals = devices.zeros(shapes, self._router.wide, slots.device)
        summed = []
        for g, own_slots in enumerate(distinct.split_with_sizes(numbers_distinct)):
            grads = [grad[:size] for (_, grad), size in zip(held[g], sizes[g], strict=True)]
            total, at = torch.cat(grads) if len(grads) > 1 else grads[0], of_places[g]
            if at is not None:
                total = totals[g].index_add_(0, at, total)
            # Rounded like the sum that copies of a replicated row receive: training must not depend on the placement.
            summed.append(RowGradients(g, own_slots, total.to(self._router.wire[g]).to(total.dtype), sole=True))
        return summed


def _update_tier(
    tier: TieredRows,
    store: GroupStore,
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    optimizer: RowUpdate,
    step: int,
) -> None:
    """Update rows of a dim-group in tiered storage, as many at a time as there are cache slots."""

    def keys_of(places: torch.Tensor) -> torch.Tensor:
        return store.keys_at(tier.slots_at(places))

    for slots, grads in parts:
        for block, places in tier.visit(slots, changes=True):
            part = GroupUpdate(
                tier.rows, tier.state, [(places, grads[block])], keys_of, optimizer=store.group.optimizer
            )
            optimizer.update_groups([part], step)


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
    def of(
        lists: SyncLists, all_reduced: Sequence[bool], wire: Sequence[torch.dtype], wide: Sequence[torch.dtype]
    ) -> SumLists:
        """Make them of the lists of all hops. Rows that are all-reduced are left out of the lists of what is sent.

        Args:
            all_reduced, wire, wide: as in ``ReplicaSums``.
        """
        of_hops: list[tuple[SyncList, list[bool]]] = []
        for hop, reduces in enumerate(all_reduced):
            upstream, downstream = lists.upstream[hop], lists.downstream[hop]
            sent = [not (reduces and lossless) for lossless in _reducible(wire, wide)]
            of_hops += [(rows, sent) for rows in (upstream, downstream, upstream, downstream)]
            of_hops.append((lists.reduced[hop], [True] * len(sent)))
        groups, peers = len(wire), [len(rows.blocks) for rows, _ in of_hops]
        numbers = []
        first = 0
        for rows, kept in of_hops:
            widths = [len(of_group) for of_peer in rows.blocks for of_group in of_peer]
            part = first + np.arange(groups) * len(rows.blocks) + np.arange(len(rows.blocks))[:, None]
            numbers.append(np.repeat(np.where(kept, part, groups * sum(peers)).ravel(), widths))
            first += groups * len(rows.blocks)
        index = torch.cat([rows.index for rows, _ in of_hops])
        return SumLists(peers, groups, index, np.concatenate(numbers).astype(np.int32))

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
        lists: ``SumLists.of`` of the lists of ``touched``.
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
        # Per hop the five lists; of each, per dim-group the rows of ``sums`` and how many of each peer.
        self._parts = lists.by_part(self._places(entries), counts)
        # ``[station][group]``: the rows of ``sums`` of the replicated rows held at the station.
        self._held: list[list[torch.Tensor]] = []

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
        several = [sum(count > 0 for count in counts) > 1 for _, counts in received]
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
            Column(sums, rows, counts, back, wire, TrafficKind.SYNC)
            for sums, wire, (rows, counts), (_, back) in zip(
                self.sums, self._wire, sent_parts, received_parts, strict=True
            )
        ]


def _reducible(wire: Sequence[torch.dtype], wide: Sequence[torch.dtype]) -> list[bool]:
    """Return for each dim-group whether an all-reduce in the dtype of the wire loses nothing."""
    return [a == b for a, b in zip(wire, wide, strict=True)]


_UP_SENT, _UP_RECEIVED, _DOWN_RECEIVED, _DOWN_SENT, _REDUCED = range(5)
# Lists of each hop, as in ``SumLists.of``: gradients sent up and received, sums received from above and sent down,
# rows all-reduced.
_LISTS = 5
