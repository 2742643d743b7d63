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
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from flexd.control.protocol.report import StepPhase
from flexd.core.placement import RankLayout
from flexd.embedding import devices
from flexd.embedding.exchange.hop import PeerWords
from flexd.embedding.exchange.phase_meter import in_phase
from flexd.embedding.exchange.route import Route, StationRows
from flexd.embedding.exchange.router import Router, merge_passes
from flexd.embedding.exchange.station_lookup import Dedup
from flexd.embedding.replicas.replica_sums import ReplicaSums, SumLists, sum_lists
from flexd.embedding.replicas.touched_rows import SyncLists, TouchedRows
from flexd.embedding.row_optimizers import GroupUpdate, KeysOf, RowUpdate
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


def sum_by_index(index: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [n] and [n, dim] -> unique ascending indices and the sums of their gradients."""
    unique, inverse = torch.unique(index, return_inverse=True)
    return unique, grads.new_zeros((len(unique), grads.shape[1])).index_add_(0, inverse, grads)


class ReplicaSync:
    """Sums gradients over all ranks through a ``Router``, and updates the rows that this rank holds.

    Args:
        updated: called with the rows that are about to be updated.
    """

    def __init__(
        self,
        stores: Sequence[GroupStore],
        router: Router,
        layout: RankLayout,
        updated: Callable[[Sequence[RowGradients], RowUpdate], None] | None = None,
    ) -> None:
        self._stores = list(stores)
        self._updated = updated
        self._router, self.phases = router, router.phases
        self._layout = layout
        self._first_slots = [0, *accumulate(store.home_rows + store.replica_slots for store in self._stores)]
        """Number of slots of the dim-groups before each, and of all."""
        self._numbers = devices.Numbers(self._stores[0].rows.device)
        self._dedup = Dedup(0, self._first_slots[-1], self._stores[0].rows.device, self._numbers)
        self._lists: SyncLists | None = None
        self._sum_lists: tuple[SyncLists, SumLists] | None = None
        """Those of the last step, and what was made of them."""
        self._blocks_version = -1
        self._hops = router.hops

    def new_touched(self) -> TouchedRows | None:
        """Return what collects the replicated rows that a pass touches; None if no hop has any. Equal on all ranks."""
        directory = self._stores[0].directory
        if self._router.hops is not self._hops:
            self._lists, self._hops = None, self._router.hops
        if self._lists is None or directory.blocks_version != self._blocks_version:
            self._lists = SyncLists.of(directory, self._router.hops, self._layout)
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
            dims = [store.rows.shape[1] for store in self._stores]
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
        """Update the rows. ``step``: as in ``RowUpdate.update_groups``."""
        if self._updated is not None:
            self._updated(summed, optimizer)
        # One part a tier and group has the same rows in the same order on every holder: bit-equal by construction.
        groups = []
        for g, store in enumerate(self._stores):
            parts = [(part.slots, part.grads) for part in summed if part.group == g]
            if store.tier is not None:
                _update_tier(store.tier, parts, store.keys_at, optimizer, step, store.group.optimizer)
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
        return peers.all_to_all(words.words, words.sent, words.received, sync_counts=words.sent)

    def _lists_of_sums(self, lists: SyncLists, all_reduced: Sequence[bool]) -> SumLists:
        if self._sum_lists is None or self._sum_lists[0] is not lists:
            self._sum_lists = lists, sum_lists(lists, all_reduced, self._router.wire, self._router.wide)
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
            (0 if places is None else number, store.rows.shape[1])
            for number, store in zip(numbers_distinct, self._stores, strict=True)
        ]
        totals = devices.zeros(shapes, self._router.wide, slots.device)
        joined = [] if places is None else self._joined(held, sizes)
        summed = []
        for g, own_slots in enumerate(distinct.split_with_sizes(numbers_distinct)):
            grads = [grad[:size] for (_, grad), size in zip(held[g], sizes[g], strict=True)]
            at = of_places[g]
            if at is None:
                total = torch.cat(grads) if len(grads) > 1 else grads[0]
            else:
                total = totals[g].index_add_(0, at, joined[g])
            # Rounded like the sum that copies of a replicated row receive: training must not depend on the placement.
            summed.append(RowGradients(g, own_slots, total.to(self._router.wire[g]).to(total.dtype), sole=True))
        return summed

    def _joined(
        self, held: Sequence[Sequence[tuple[StationRows, torch.Tensor]]], sizes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Join the gradients of plain home rows of each dim-group, with one kernel for all of a dtype."""
        parts = [
            [grad[:size].view(-1) for (_, grad), size in zip(of_group, of_sizes, strict=True)]
            for of_group, of_sizes in zip(held, sizes, strict=True)
        ]
        joined: dict[int, torch.Tensor] = {}
        for dtype in dict.fromkeys(self._router.wide):
            chosen = [g for g, wide in enumerate(self._router.wide) if wide == dtype]
            flat = torch.cat([part for g in chosen for part in parts[g]])
            numbers = [sum(part.shape[0] for part in parts[g]) for g in chosen]
            joined |= dict(zip(chosen, flat.split_with_sizes(numbers), strict=True))
        return [joined[g].view(-1, store.rows.shape[1]) for g, store in enumerate(self._stores)]


def _update_tier(
    tier: TieredRows,
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    keys_at: KeysOf,
    optimizer: RowUpdate,
    step: int,
    name: str,
) -> None:
    """Update rows in tiered storage, as many at a time as there are cache slots."""

    def keys_of(places: torch.Tensor) -> torch.Tensor:
        return keys_at(tier.slots_at(places))

    for slots, grads in parts:
        for block, places in tier.visit(slots, changes=True):
            part = GroupUpdate(tier.rows, tier.state, [(places, grads[block])], keys_of, optimizer=name)
            optimizer.update_groups([part], step)
