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

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from flexd.core.layout import RankLayout, Tier
from flexd.embedding.exchange.collectives import TrafficKind
from flexd.embedding.exchange.dedup import Dedup
from flexd.embedding.exchange.hop import Column, Hop, PeerWords
from flexd.embedding.exchange.route import Route, StationRows
from flexd.embedding.exchange.router import Router
from flexd.embedding.replicas.touched_rows import SyncList, SyncLists, TouchedRows
from flexd.embedding.row_optimizers import RowOptimizer
from flexd.embedding.store.store import GroupStore


@dataclass(frozen=True)
class RowGradients:
    """Gradients of one step, summed over all ranks. Equal rows in equal order on every rank that holds them.

    Attributes:
        group: the dim-group.
        slots: int64 [n], unique.
        grads: [n, dim], in the dtype in which gradients are added (``Router.wide``).
    """

    group: int
    slots: torch.Tensor
    grads: torch.Tensor


def sum_by_index(index: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [n] and [n, dim] -> unique ascending indices and the sums of their gradients."""
    unique, inverse = torch.unique(index, return_inverse=True)
    return unique, grads.new_zeros((len(unique), grads.shape[1])).index_add_(0, inverse, grads)


class ReplicaSync:
    """Sums gradients over all ranks through a ``Router``, and updates the rows that this rank holds."""

    def __init__(self, stores: Sequence[GroupStore], router: Router, layout: RankLayout) -> None:
        self._stores = list(stores)
        self._router = router
        self._layout = layout
        self._dedup = [Dedup(0, store.home_rows, store.rows.device) for store in self._stores]
        self._lists: SyncLists | None = None
        self._listed: list[object] = []

    @property
    def working_bytes(self) -> int:
        """Bytes of the tables that find distinct slots, and of the lists of replicated rows."""
        lists = 0 if self._lists is None else self._lists.nbytes
        return lists + sum(dedup.nbytes for dedup in self._dedup)

    def new_touched(self) -> TouchedRows | None:
        """Return what collects the replicated rows that a pass touches; None if no hop has any. Equal on all ranks."""
        directories: list[object] = [store.directory for store in self._stores]
        if self._lists is None or any(a is not b for a, b in zip(directories, self._listed, strict=True)):
            self._lists = SyncLists.of(self._stores, self._router.hops, self._layout)
            self._listed = directories
        return TouchedRows(self._lists, self._stores[0].rows.device) if any(self._lists.used) else None

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
            dims = [store.rows.shape[1] for store in self._stores]
            all_reduced = [hop.all_reduces for hop in router.hops]
            replicas = ReplicaSums(touched, dims, router.wire, router.wide, all_reduced)
        held = router.push(*router.merge(passes), replicas)
        summed = [RowGradients(group, *self._sum_plain(group, parts)) for group, parts in enumerate(held)]
        if replicas is not None and touched is not None:
            replicas.spread(router.hops)
            for group, store in enumerate(self._stores):
                positions = touched.positions(group)
                tiers, slots = store.directory.tiers_at(positions), store.directory.slots_at(positions)
                for tier in (Tier.NODE, Tier.DEVICE):
                    at, grads = replicas.at_tier(group, tiers, tier)
                    summed.append(RowGradients(group, slots.index_select(0, at), grads))
        return summed

    def update(self, summed: Sequence[RowGradients], optimizer: RowOptimizer, step: int) -> None:
        """Update the rows. ``step``: as in ``RowOptimizer.update``."""
        # One call a tier and group with the same rows in the same order on every holder: bit-equal by construction.
        for part in summed:
            store = self._stores[part.group]
            optimizer.update(store.rows, store.state, part.slots, part.grads, step)

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
        return self._router.hops[hop].exchange_words(words)

    def _sum_plain(
        self, group: int, parts: Sequence[tuple[StationRows, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the gradients of plain home rows over the stations: int64 [n] slots, [n, dim].

        Gradients of this rank arrive at the first station, those of other ranks at later ones.
        """
        slots, grads = [], []
        for rows, grad in parts:
            plain = rows.plain
            slots.append(rows.slots[:plain])
            grads.append(grad[:plain])
        distinct, places = self._dedup[group].unique(torch.cat(slots))
        if places is None:
            total = torch.cat(grads) if len(grads) > 1 else grads[0]
        else:
            total = grads[0].new_zeros((len(distinct), grads[0].shape[1]))
            for at, grad in zip(torch.split(places, [len(part) for part in slots]), grads, strict=True):
                total.index_add_(0, at, grad)
        # Rounded like the sum that copies of a replicated row receive: training must not depend on the placement.
        return distinct, total.to(self._router.wire[group]).to(total.dtype)


class ReplicaSums:
    """Gradients of the replicated rows that a step touched: those of this rank at first, then the sums over all ranks.

    A ``GradientPiggyback``.

    Args:
        touched: complete. One transfer to the host reads all sizes.
        dims, wire, wide: of each dim-group; gradients travel in ``wire`` and are added in ``wide``.
        all_reduced: for each hop, whether it all-reduces the dim-groups that lose nothing by it.
    """

    def __init__(
        self,
        touched: TouchedRows,
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
        self._first_entries = touched.lists.first_entries
        lists = [part for hop, reduces in enumerate(all_reduced) for part in self._lists(hop, reduces=reduces)]
        self._rows = touched.all_positions()
        firsts = torch.tensor(self._first_entries, device=self._rows.device)
        bounds = torch.searchsorted(self._rows, firsts)
        numbers = torch.cat([bounds, *(rows.counts(bits).to(bounds.device) for rows, bits in lists)]).tolist()
        self._starts, counts = numbers[: self._groups + 1], numbers[self._groups + 1 :]
        self.sums = [
            torch.zeros((end - start, dim), dtype=dtype, device=bounds.device)
            for (start, end), dim, dtype in zip(pairwise(self._starts), dims, wide, strict=True)
        ]
        self._parts: list[list[tuple[torch.Tensor, list[int]]]] = []
        """Per hop the five lists; of each, per dim-group the rows of ``sums`` and how many of each peer."""
        for rows, bits in lists:
            size = len(rows.spans) * self._groups
            if not len(bits):
                counts = counts[size:]
                self._parts.append([(self._rows[:0], [0] * len(rows.spans))] * self._groups)
                continue
            of_list, counts = counts[:size], counts[size:]
            pieces = torch.split(self._places(rows.entries_of(bits, of_list)), of_list)
            self._parts.append(
                [
                    (torch.cat(pieces[g :: self._groups]) - self._starts[g], of_list[g :: self._groups])
                    for g in range(self._groups)
                ]
            )

    def add(self, group: int, rows: StationRows, grads: torch.Tensor) -> None:
        entries = rows.entries[rows.plain :]
        if len(entries):
            self.sums[group].index_add_(0, self._places(entries) - self._starts[group], grads[rows.plain :])

    def up(self, hop: int) -> list[Column]:
        columns = self._columns(hop, _UP_SENT, _UP_RECEIVED)
        return columns if any(any(column.sent) or any(column.received) for column in columns) else []

    def recv_up(self, hop: int, arrived: Sequence[Sequence[torch.Tensor]]) -> None:
        if not arrived:
            return
        received = self._parts[_LISTS * hop + _UP_RECEIVED]
        for sums, parts, (rows, counts) in zip(self.sums, arrived, received, strict=True):
            pieces = [
                (at, part.to(sums.dtype))
                for part, at in zip(parts, torch.split(rows, counts), strict=True)
                if len(part)
            ]
            # Received gradients are added up before they join those of this rank: as ``Router`` adds them.
            total = sums if len(pieces) < 2 else torch.zeros_like(sums)
            for at, part in pieces:
                total.index_add_(0, at, part)
            if total is not sums:
                sums += total

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
            for sums, parts, (rows, counts) in zip(self.sums, arrived, received, strict=True):
                for part, at in zip(parts, torch.split(rows, counts), strict=True):
                    if len(part):
                        sums.index_copy_(0, at, part.to(sums.dtype))

    def at_tier(self, group: int, tiers: torch.Tensor, tier: Tier) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 tiers of the touched rows of a dim-group -> (int64 [m] places of those at ``tier``, [m, dim] sums)."""
        chosen = (tiers == tier).nonzero().view(-1)
        return chosen, self.sums[group].index_select(0, chosen)

    def _lists(self, hop: int, *, reduces: bool) -> list[tuple[SyncList, torch.Tensor]]:
        """Return the five lists of a hop, each with uint8 touched bits. Rows that are all-reduced are left out of the
        lists of what is sent."""
        lists, touched = self._touched.lists, self._touched
        received, sent = touched.down_received[hop], touched.down_sent[hop]
        if received is None or sent is None:
            raise AssertionError("the union of touched rows is not known")
        reduced = lists.reduced[hop]
        parts = [
            (lists.upstream[hop], touched.up_sent[hop]),
            (lists.downstream[hop], touched.up_received[hop]),
            (lists.upstream[hop], received),
            (lists.downstream[hop], sent),
        ]
        if reduces:
            not_reduced = [not reducible for reducible in self._reducible]
            parts = [rows.of_groups(not_reduced, bits) for rows, bits in parts]
        return [*parts, (reduced, reduced.gather(touched.entries))]

    def _places(self, entries: torch.Tensor) -> torch.Tensor:
        """int64 [n] touched entries -> int64 [n] places among all touched entries."""
        return torch.searchsorted(self._rows, entries)

    def _all_reduce(self, hop: Hop, rows: Sequence[torch.Tensor]) -> None:
        """All-reduce int64 ``rows[group]`` of ``sums``: one collective for all dim-groups of a dtype."""
        for dtype in sorted({sums.dtype for sums in self.sums}, key=str):
            groups = [g for g, sums in enumerate(self.sums) if self._reducible[g] and sums.dtype == dtype]
            parts = [self.sums[g].index_select(0, rows[g]).view(-1) for g in groups]
            if not parts:
                continue
            flat = torch.cat(parts)
            hop.peers.all_reduce(flat, kind=TrafficKind.SYNC)
            for g, part in zip(groups, torch.split(flat, [len(part) for part in parts]), strict=True):
                self.sums[g].index_copy_(0, rows[g], part.view(-1, self.sums[g].shape[1]))

    def _columns(self, hop: int, sent: int, received: int) -> list[Column]:
        sent_parts, received_parts = self._parts[_LISTS * hop + sent], self._parts[_LISTS * hop + received]
        return [
            Column(sums, rows, counts, back, wire, TrafficKind.SYNC)
            for sums, wire, (rows, counts), (_, back) in zip(
                self.sums, self._wire, sent_parts, received_parts, strict=True
            )
        ]


_UP_SENT, _UP_RECEIVED, _DOWN_RECEIVED, _DOWN_SENT, _REDUCED = range(5)
_LISTS = 5
"""Lists of each hop: gradients sent up and received, sums received from above and sent down, rows all-reduced."""
