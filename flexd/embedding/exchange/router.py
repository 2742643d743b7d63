"""Finds where the rows of a look-up are, and carries rows and gradients along the route.

A request passes stations (self, node owner, home) joined by hops and stops at the first that holds a copy. The route
records, per station and dim-group, which rows are held there and which are requested from the next station; the forward
pass walks it from the last station to the first, the backward pass from the first to the last.

Data about replicated rows travels in the same messages: which are touched with the ids and rows of a look-up
(``TouchedRows``), their gradients and sums with those of other rows (``ReplicaSums``).

On a GPU the host waits for the device once a station for the number of distinct rows, once a hop for the sizes, and
once a pass for the accesses by tier. Carrying rows and gradients waits for nothing, except twice a step for the numbers
of touched replicas (``ReplicaSums``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from flexd.core.errors import EmbeddingError
from flexd.core.step_phases import StepPhase
from flexd.embedding import devices
from flexd.embedding.exchange.calls import in_phase
from flexd.embedding.exchange.collectives import Traffic
from flexd.embedding.exchange.column import Column, ReceivedRows, add_columns, joined_columns
from flexd.embedding.exchange.hop import Agreement, AgreementFlags, Hop, host_numbers
from flexd.embedding.exchange.route import (
    COUNT_SHIFT,
    FeatureKeys,
    LookedUpRows,
    Route,
    StationLookup,
    StationRows,
    counts_of_group,
)
from flexd.embedding.replicas.touched_rows import TouchedRows
from flexd.embedding.store.quantized_rows import looked_up
from flexd.embedding.store.store import TORCH_DTYPES, GroupStore

if TYPE_CHECKING:
    from flexd.embedding.replicas.replica_sync import ReplicaSums

_KEY_MASK = (1 << COUNT_SHIFT) - 1


class RowPiggyback(Protocol):
    """Further rows that travel with the rows of a look-up; called for the last hop first."""

    def columns(self, hop: Hop) -> list[Column]:
        """Return the columns that travel over a hop."""
        ...

    def receive(self, hop: Hop, arrived: Sequence[ReceivedRows]) -> None:
        """Receive the rows of each column of ``columns``."""
        ...


class Router:
    """Finds routes, and carries rows and gradients along them.

    Args:
        comm_dtype: dtype of rows and gradients on the wire; None: each table's own. Gradients are added in float32, or
            in the wider of table and wire. With a narrower wire every row is rounded when it is read, on any rank, so
            that training does not depend on the placement.
    """

    def __init__(
        self,
        stores: Sequence[GroupStore],
        hops: Sequence[Hop],
        traffic: Traffic,
        comm_dtype: str | None = None,
    ) -> None:
        self._stores = list(stores)
        self.traffic, self.phases = traffic, traffic.phases
        self.lookup = StationLookup(stores)
        self.wire: list[torch.dtype] = []
        """Dtype of each dim-group's gradients and sums of bags on the wire."""
        self.wire_of_rows: list[torch.dtype] = []
        """Of its rows: the same, but for quantized rows, which travel as they are stored."""
        self.wide: list[torch.dtype] = []
        """Dtype of each dim-group in which gradients are added."""
        self.use(hops, comm_dtype)

    def use(self, hops: Sequence[Hop], comm_dtype: str | None) -> None:
        """Let rows and gradients of later look-ups go over these hops, in this dtype. No route of an earlier one may be
        used any more."""
        self.hops = list(hops)
        self.lookup.forget_hops()
        given = None if comm_dtype is None else TORCH_DTYPES[comm_dtype]
        self.wire[:] = [given or store.values_dtype for store in self._stores]
        self.wire_of_rows[:] = [
            store.dtype if store.dtype == torch.int8 else wire
            for store, wire in zip(self._stores, self.wire, strict=True)
        ]
        self.wide[:] = [
            torch.promote_types(torch.promote_types(store.dtype, wire), torch.float32)
            for store, wire in zip(self._stores, self.wire, strict=True)
        ]

    @in_phase(StepPhase.IDS)
    def find(
        self,
        found: FeatureKeys,
        agreement: Agreement,
        touched: TouchedRows | None = None,
        changed: torch.Tensor | None = None,
    ) -> Route:
        """Collective. Find the route of keys, repeats allowed; bags need a ``SummingRouter``.

        Where a rank reports a fault, or ranks make different calls, the sizes are still exchanged so that every
        rank detects it; the route is then invalid.

        Args:
            touched: given on all ranks or on none.
            changed: bool [] on the device, see ``Agreement.changed``.
        """
        lookup = self.lookup
        ids, numbers, faulty = found.keys, found.numbers, found.faulty
        weights: torch.Tensor | None = None
        looked_up: LookedUpRows | None = None
        stations, all_keys, requested, served, by_tier = [], [], [], [], []
        for station, hop in enumerate((*self.hops, None)):
            located = lookup.locate(ids, weights, hop)
            by_tier.append(located.held_accesses)
            looked_up = looked_up or LookedUpRows((located.keys,), located.accesses, sum(numbers))
            if touched is not None:
                touched.add(located.entries)
            if hop is None:
                flags = [flag.to(ids.dtype).view(1) for flag in (faulty, changed) if flag is not None]
                own = host_numbers(torch.cat([located.sections, *by_tier, *flags]))
                sizes, accesses, read = np.split(own, [len(located.sections), len(own) - len(flags)])
                home, node, device = accesses.reshape(-1, 3).sum(axis=0).tolist()
                if away := int(lookup.split_sections(sizes, 1)[1].sum()):
                    raise EmbeddingError(f"{away} rows were requested from a rank that is not their home")
                if changed is not None and read[-1]:
                    agreement = replace(agreement, flags=agreement.flags | AgreementFlags.CHANGED)
                if faulty is not None and read[0]:
                    agreement = replace(agreement, fault=1)
            else:
                away_sizes = lookup.away_sizes(located, hop)
                if agreement.diverged:
                    away_sizes = torch.zeros_like(away_sizes)
                sent, received, agreement, sizes = hop.exchange_sizes(
                    away_sizes, agreement, faulty, located.sections, changed
                )
                faulty = changed = None  # they are in the agreement
            stations.append(lookup.stations(located, sizes, 1 if hop is None else hop.peers.size, numbers))
            all_keys.append(
                lookup.numbered_keys(located, stations[0]) if station == 0 else ids.split_with_sizes(numbers)
            )
            if hop is None:
                break
            if agreement.diverged:  # the peers of the next hop must detect it too
                ids, numbers, weights, touched = ids[:0], [0] * lookup.groups, None, None
                continue
            words = None if touched is None else touched.up(station)
            arrived, arrived_words = hop.exchange_ids(
                lookup.requests(located, sent), sent, received, None if words is None or words.empty else words
            )
            if touched is not None and words is not None:
                touched.recv_up(station, words.words if arrived_words is None else arrived_words)
            ids, weights = arrived & _KEY_MASK, arrived >> COUNT_SHIFT
            numbers = received.sum(axis=0).tolist()
            requested.append(sent)
            served.append(received)
        self.traffic.home_accesses += home
        self.traffic.node_accesses += node
        self.traffic.device_accesses += device
        keys = tuple(all_keys)
        return Route(tuple(stations), tuple(requested), tuple(served), agreement, keys, looked_up=looked_up)

    def meet(self, agreement: Agreement) -> Agreement:
        """Collective. Exchange the first messages of a look-up without any key, so that ranks in a look-up, or in
        another call that meets, learn of this one; return the agreement of all ranks."""
        for hop in self.hops:
            agreement = hop.meet(agreement, self.lookup.groups, self._stores[0].rows.device)
        return agreement

    @in_phase(StepPhase.ROWS)
    def fetch(
        self,
        route: Route,
        touched: TouchedRows | None = None,
        *,
        expand: bool = True,
        chunk: RowPiggyback | None = None,
    ) -> list[torch.Tensor]:
        """Collective. Return per group [requests of this rank, dim]; without ``expand`` [rows of station 0, dim].

        Args:
            chunk: given on all ranks or on none.
        """
        if touched is not None and touched.complete:
            touched = None
        found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for station in range(len(route.stations) - 1, -1, -1):
            arrived = None
            if station < len(self.hops):
                requested, served = route.requested[station], route.served[station]
                columns = [
                    Column(rows, index, counts_of_group(g, served), counts_of_group(g, requested), wire)
                    for g, ((rows, index), wire) in enumerate(zip(found, self.wire_of_rows, strict=True))
                ]
                words = None if touched is None else touched.down(station)
                if words is not None and not words.empty:
                    columns.append(words.as_column())
                carried = [] if chunk is None else chunk.columns(self.hops[station])
                arrived = self.hops[station].exchange([*columns, *carried])
                if chunk is not None:
                    chunk.receive(self.hops[station], arrived[len(columns) :])
                    del arrived[len(columns) :]
                if touched is not None and words is not None:
                    words_back = words.words if words.empty else arrived.pop().whole(torch.int64).view(-1)
                    touched.recv_down(station, words_back)
            found = self._rows_at(route.stations[station], arrived, expand or station > 0)
        return [
            self._values_of(rows if index is None else rows.index_select(0, index), store)
            for (rows, index), store in zip(found, self._stores, strict=True)
        ]

    @staticmethod
    def _values_of(rows: torch.Tensor, store: GroupStore) -> torch.Tensor:
        return looked_up(rows, store.dtype) if store.dtype == torch.int8 else rows.to(store.dtype)

    def _rows_at(
        self, station: Sequence[StationRows], arrived: Sequence[ReceivedRows] | None, expand: bool
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return per dim-group ([m, dim] rows in the dtype of the wire, int64 [requests] index of each requested row or
        None if they are in the order of the requests). Without ``expand`` the distinct rows are meant."""
        found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        joined: list[int] = []
        for group, (rows, wire) in enumerate(zip(station, self.wire_of_rows, strict=True)):
            column, slots, index = self._stores[group].rows, rows.slots, rows.expand if expand else None
            if not isinstance(column, torch.Tensor):
                source, slots = column.index_select(0, slots, counts=True), torch.arange(rows.held, device=slots.device)
            else:
                source = column
            if rows.held == rows.rows and source.dtype == wire:
                # Expanded when they are read: the distinct rows are not made.
                found.append((source, slots if index is None else slots.index_select(0, index)))
                continue
            found.append((source.index_select(0, slots).to(wire), index))
            if rows.held < rows.rows:
                joined.append(group)
        if arrived is not None:
            of_groups = [arrived[group] for group in joined]
            for group, whole in zip(
                joined, joined_columns(of_groups, ahead=[found[g][0] for g in joined]), strict=True
            ):
                found[group] = whole.to(self.wire_of_rows[group]), found[group][1]
        return found

    @in_phase(StepPhase.PUSH)
    def reduce(self, route: Route, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sum per group [requests of this rank, dim] gradients of equal rows -> [rows of station 0, dim]. The last
        requests may have none."""
        first = route.stations[0]
        totals = self._zeros([0 if rows.expand is None else rows.rows for rows in first])
        return [
            _with_rows(grad.to(wide), rows.rows)
            if rows.expand is None
            else total.index_add_(0, rows.expand[: len(grad)], grad.to(wide))
            for rows, grad, wide, total in zip(first, grads, self.wide, totals, strict=True)
        ]

    def _zeros(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Return zeros [number of the dim-group, dim] in the dtype in which gradients are added."""
        shapes = [(number, store.group.dim) for number, store in zip(numbers, self._stores, strict=True)]
        return devices.zeros(shapes, self.wide, self._stores[0].rows.device)

    @in_phase(StepPhase.PUSH)
    def push(
        self, route: Route, grads: Sequence[torch.Tensor], replicas: ReplicaSums | None = None
    ) -> list[list[tuple[StationRows, torch.Tensor]]]:
        """Collective. Carry per group [rows of station 0, dim] gradients to the ranks that hold the rows.

        Returns:
            Per group and station (rows, gradients [held, dim] of those that this rank holds there).
        """
        held: list[list[tuple[StationRows, torch.Tensor]]] = [[] for _ in self._stores]
        grads = [grad.to(wide) for grad, wide in zip(grads, self.wide, strict=True)]
        if replicas is not None:
            replicas.start(route.stations)
        for station, at_station in enumerate(route.stations):
            for group, rows in enumerate(at_station):
                here = grads[group][: rows.held]
                held[group].append((rows, here))
                if replicas is not None:
                    replicas.add(station, group, rows, here)
            if station == len(self.hops):
                break
            sent, received = route.requested[station], route.served[station]
            columns = [
                Column(grad[rows.held :], None, counts_of_group(g, sent), counts_of_group(g, received), wire)
                for g, (grad, rows, wire) in enumerate(zip(grads, at_station, self.wire, strict=True))
            ]
            if replicas is not None:
                columns += replicas.up(station)
            hop = self.hops[station]
            arrived = hop.exchange(columns)
            grads = self._sum_by_row(arrived[: len(at_station)], route.stations[station + 1])
            if replicas is not None:
                replicas.recv_up(station, arrived[len(at_station) :])
        return held

    def _sum_by_row(self, arrived: Sequence[ReceivedRows], station: Sequence[StationRows]) -> list[torch.Tensor]:
        """Sum the received gradients of each dim-group by row -> [rows, dim].

        Received gradients are added in the order of the peers, then those of this rank: at every tier the gradient of a
        row is the sum of a rank's own and of all received ones, so that every placement rounds alike.
        """
        totals = self._zeros([0 if rows.expand is None else rows.rows for rows in station])
        added = [group for group, rows in enumerate(station) if rows.expand is not None]
        add_columns(
            [arrived[group] for group in added],
            [totals[group] for group in added],
            [rows.expand for rows in station if rows.expand is not None],
        )
        kept = [group for group, rows in enumerate(station) if rows.expand is None]
        for group, whole in zip(kept, joined_columns([arrived[group] for group in kept]), strict=True):
            totals[group] = whole.to(self.wide[group])
        return totals

    def sums(self, route: Route, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return no sums: bags are not added up here (``SummingRouter``)."""
        del route, rows
        return []

    def spread(self, passes: Sequence[tuple[Route, Sequence[torch.Tensor] | None]]) -> list[list[torch.Tensor]]:
        raise AssertionError("routes without bags")


def merge_passes(
    router: Router, passes: Sequence[tuple[Route, Sequence[torch.Tensor]]]
) -> tuple[Route, list[torch.Tensor]]:
    """Merge passes over one placement into one route with every row once, and sum the gradients of each row.

    A step then pushes every row's gradient once. Nothing is exchanged: both ends of a hop have the requests of each
    pass, and order their union by key.

    Args:
        passes: routes, and per group [rows of the first station, dim] gradients.
    """
    if len(passes) == 1:
        return passes[0][0], list(passes[0][1])
    lookup, routes = router.lookup, [route for route, _ in passes]
    groups = range(lookup.groups)
    ids = torch.cat([route.keys[0][g] for g in groups for route in routes])
    numbers = [sum(len(route.keys[0][g]) for route in routes) for g in groups]
    stations: list[tuple[StationRows, ...]] = []
    all_keys, requested, served = [], [], []
    for station, hop in enumerate((*router.hops, None)):
        located = lookup.locate(ids, None, hop, sort=True)
        peers = 1 if hop is None else hop.peers.size
        if hop is None:
            sizes = host_numbers(located.sections)
        else:
            ids_served, served_sizes = _union_served(lookup, routes, station, peers)
            both = host_numbers(torch.cat([located.sections, served_sizes]))
            sizes, of_served = both[: len(located.sections)], both[len(located.sections) :]
        _, away = lookup.split_sections(sizes, peers)
        stations.append(lookup.stations(located, sizes, peers, numbers))
        all_keys.append(lookup.numbered_keys(located, stations[0]) if station == 0 else ids.split_with_sizes(numbers))
        if hop is None:
            break
        by_group = of_served.reshape(lookup.groups, peers)
        requested.append(away.T)
        served.append(by_group.T)
        ids, numbers = ids_served, by_group.sum(axis=1).tolist()
    total = []
    for group, (first, dtype) in enumerate(zip(stations[0], router.wide, strict=True)):
        parts = [grads[group].to(dtype) for _, grads in passes]
        if first.expand is None:
            total.append(torch.cat(parts))
            continue
        total.append(parts[0].new_zeros((first.rows, parts[0].shape[1])))
        for part, at in zip(parts, first.expand.split_with_sizes([len(part) for part in parts]), strict=True):
            total[group].index_add_(0, at, part)
    merged = Route(tuple(stations), tuple(requested), tuple(served), routes[-1].agreement, tuple(all_keys))
    return merged, total


def _union_served(
    lookup: StationLookup, routes: Sequence[Route], station: int, peers: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unite the requests that each peer made in any pass over the hop after a station.

    Returns:
        (int64 keys ordered by dim-group, peer and key; int64 [groups x peers] their numbers).
    """
    first, end = lookup.stores[0].group.first_key, lookup.stores[-1].group.end_key
    sections, keys, sizes = [], [], []
    for route in routes:
        for group in range(lookup.groups):
            keys.append(route.keys[station + 1][group])
            sections += [group * peers + peer for peer in range(peers)]
            sizes += counts_of_group(group, route.served[station])
    device = keys[0].device
    both = devices.uploaded([sections, sizes], device)
    of_request = both[0].repeat_interleave(both[1], output_size=sum(sizes))
    distinct = torch.unique(of_request * (end - first) + (torch.cat(keys) - first))
    section = torch.div(distinct, end - first, rounding_mode="floor")
    numbers = section.new_zeros(lookup.groups * peers).scatter_add_(0, section, torch.ones_like(section))
    return distinct - section * (end - first) + first, numbers


def _with_rows(grads: torch.Tensor, rows: int) -> torch.Tensor:
    """Return [rows, dim]: zeros behind [n, dim] gradients."""
    missing = rows - len(grads)
    return torch.nn.functional.pad(grads, (0, 0, 0, missing)) if missing else grads
