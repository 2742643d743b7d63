"""Finds where the rows of a look-up are, and carries rows and gradients along the route.

A request passes stations (self, node owner, home) joined by hops and stops at the first that holds a copy. The route
records, per station and dim-group, which rows are held there and which are requested from the next station; the forward
pass walks it from the last station to the first, the backward pass from the first to the last.

The router does not depend on replicas. Data about them travels in the same messages: see ``LookupPiggyback`` and
``GradientPiggyback``, which ``flexd.embedding.replicas`` implements.

On a GPU the host waits for the device once a station for the number of distinct rows, once a hop for the sizes, and
once a pass for the accesses by tier. Carrying rows and gradients waits for nothing, except twice a step for the numbers
of touched replicas (``ReplicaSums``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from flexd.core.errors import EmbeddingError
from flexd.embedding.exchange.collectives import Traffic
from flexd.embedding.exchange.column import Column, ReceivedRows
from flexd.embedding.exchange.hop import Agreement, Hop, PeerWords
from flexd.embedding.exchange.merge import merge_passes
from flexd.embedding.exchange.route import COUNT_SHIFT, Route, StationRows, counts_of_group
from flexd.embedding.exchange.station_lookup import StationLookup, regrouped, transposed
from flexd.embedding.store.listed_rows import ListedRows
from flexd.embedding.store.store import TORCH_DTYPES, GroupStore

_KEY_MASK = (1 << COUNT_SHIFT) - 1


class LookupPiggyback(Protocol):
    """Words that travel with the ids and rows of a look-up.

    Called in the order of the stations: ``add`` for station 0, ``up`` and ``recv_up`` of hop 0,
    ``add`` of station 1, and so on; then ``down`` and ``recv_down`` from the last hop to the first.
    """

    @property
    def complete(self) -> bool:
        """True once ``recv_down`` was called for every hop. Then no bits are sent with the rows."""
        ...

    def add(self, entries: torch.Tensor) -> None:
        """Add the rows of a station: int64 [n] entries of listed rows, -1 for all others."""
        ...

    def up(self, hop: int) -> PeerWords:
        """Return the words that travel with the ids of a hop."""
        ...

    def recv_up(self, hop: int, words: torch.Tensor) -> None: ...

    def down(self, hop: int) -> PeerWords:
        """Return the words that travel with the rows of a hop."""
        ...

    def recv_down(self, hop: int, words: torch.Tensor) -> None: ...


class GradientPiggyback(Protocol):
    """Columns that travel with the gradients: ``add`` for each station, then ``up`` and ``recv_up`` of its hop."""

    def add(self, group: int, rows: StationRows, grads: torch.Tensor) -> None:
        """Add [held, dim] gradients of the rows of one dim-group that are held at a station."""
        ...

    def up(self, hop: int) -> list[Column]:
        """Return the columns that travel over a hop."""
        ...

    def recv_up(self, hop: int, arrived: Sequence[ReceivedRows]) -> None:
        """Receive the rows of each column of ``up``."""
        ...


class Router:
    """Finds routes, and carries rows and gradients along them.

    Args:
        dedup: request each row once a station.
        comm_dtype: dtype of rows and gradients on the wire; None: each table's own. Gradients are added in float32, or
            in the wider of table and wire. With a narrower wire every row is rounded when it is read, on any rank, so
            that training does not depend on the placement.

    Raises:
        EmbeddingError: an unknown ``comm_dtype``.
    """

    def __init__(
        self,
        stores: Sequence[GroupStore],
        hops: Sequence[Hop],
        traffic: Traffic,
        *,
        dedup: bool,
        comm_dtype: str | None = None,
    ) -> None:
        if comm_dtype not in (None, "float32", "float16", "bfloat16"):
            raise EmbeddingError(f"comm_dtype {comm_dtype!r}", remedy="one of float32, float16, bfloat16, or None")
        self._stores = list(stores)
        self.hops = list(hops)
        self.traffic = traffic
        self._lookup = StationLookup(stores, dedup=dedup)
        self.wire = [store.dtype if comm_dtype is None else TORCH_DTYPES[comm_dtype] for store in self._stores]
        """Dtype of each dim-group on the wire."""
        self.wide = [
            torch.promote_types(torch.promote_types(store.dtype, wire), torch.float32)
            for store, wire in zip(self._stores, self.wire, strict=True)
        ]
        """Dtype of each dim-group in which gradients are added."""

    def change_hops(self, hops: Sequence[Hop]) -> None:
        """Let later look-ups go over other hops. No route of an earlier one may be used any more."""
        self.hops = list(hops)

    @property
    def working_bytes(self) -> int:
        """Bytes of the tables that find distinct keys."""
        return self._lookup.working_bytes

    @property
    def listed(self) -> ListedRows:
        """The rows that this rank lists now."""
        return self._lookup.listed

    def find(
        self,
        keys: torch.Tensor,
        agreement: Agreement,
        piggyback: LookupPiggyback | None = None,
        faulty: torch.Tensor | None = None,
        numbers: Sequence[int] | None = None,
    ) -> Route:
        """Collective. Find the route of int64 [n] keys, in any order, repeats allowed.

        Where a rank reports a fault, or ranks make different calls, the sizes are still exchanged so that every
        rank detects it; the route is then invalid.

        Args:
            piggyback: given on all ranks or on none.
            faulty: bool [] on the device: this rank reports a fault, which the host has not read.
            numbers: number of keys of each dim-group; the keys are ordered by it. None: they are in any order.
        """
        lookup = self._lookup
        ids, numbers = lookup.by_group(keys) if numbers is None else (keys, list(numbers))
        weights: torch.Tensor | None = None
        stations, all_keys, requested, served, by_tier = [], [], [], [], []
        for station, hop in enumerate((*self.hops, None)):
            located = lookup.locate(ids, weights, hop)
            by_tier.append(lookup.accesses_by_tier(located))
            if piggyback is not None:
                piggyback.add(located.entries)
            if hop is None:
                own = torch.cat([located.sections, torch.stack(by_tier).sum(dim=0), _flag(faulty, ids)]).tolist()
                sizes, (home, node, device, fault) = own[:-4], own[-4:]
                _check_all_held(sizes[2 * lookup.groups :])
                stations.append(lookup.stations(located, sizes, 1, numbers))
                all_keys.append(_by_rows(located.keys, stations[0]) if station == 0 else torch.split(ids, numbers))
                if fault and not self.hops:
                    agreement = replace(agreement, fault=1)
                break
            peers = hop.peers.size
            away_sizes = located.sections[2 * lookup.groups :].view(lookup.groups, peers).t()
            if agreement.diverged:
                away_sizes = torch.zeros_like(away_sizes)
            sent, received, agreement, sizes = hop.exchange_sizes(
                away_sizes, agreement, faulty if station == 0 else None, located.sections
            )
            stations.append(lookup.stations(located, sizes, peers, numbers))
            all_keys.append(_by_rows(located.keys, stations[0]) if station == 0 else torch.split(ids, numbers))
            if agreement.diverged:  # the peers of the next hop must detect it too
                ids, numbers, weights, piggyback = ids[:0], [0] * lookup.groups, None, None
                continue
            _, _, away = lookup.split_sections(sizes, peers)
            words = None if piggyback is None else piggyback.up(station)
            arrived, arrived_words = hop.exchange_ids(
                lookup.requests(located, away), sent, received, None if words is None or words.empty else words
            )
            if piggyback is not None and words is not None:
                piggyback.recv_up(station, words.words if arrived_words is None else arrived_words)
            by_group = regrouped(arrived, received)
            ids, weights = by_group & _KEY_MASK, by_group >> COUNT_SHIFT
            numbers = [sum(of_group) for of_group in transposed(received)]
            requested.append(sent)
            served.append(received)
        self.traffic.home_accesses += home
        self.traffic.node_accesses += node
        self.traffic.device_accesses += device
        return Route(tuple(stations), tuple(requested), tuple(served), agreement, tuple(all_keys))

    def fetch(
        self, route: Route, piggyback: LookupPiggyback | None = None, *, expand: bool = True
    ) -> list[torch.Tensor]:
        """Collective. Return per group [requests of this rank, dim]; without ``expand`` [rows of station 0, dim]."""
        if piggyback is not None and piggyback.complete:
            piggyback = None
        found: list[torch.Tensor] = []
        for station in range(len(route.stations) - 1, -1, -1):
            arrived = None
            if station < len(self.hops):
                above = zip(found, route.stations[station + 1], self.wire, strict=True)
                requested, served = route.requested[station], route.served[station]
                columns = [
                    Column(rows, next_rows.expand, counts_of_group(g, served), counts_of_group(g, requested), wire)
                    for g, (rows, next_rows, wire) in enumerate(above)
                ]
                words = None if piggyback is None else piggyback.down(station)
                if words is not None and not words.empty:
                    columns.append(words.as_column())
                arrived = self.hops[station].exchange(columns)
                if piggyback is not None and words is not None:
                    piggyback.recv_down(station, words.words if words.empty else _words(arrived.pop()))
            found = []
            for group, at_station in enumerate(route.stations[station]):
                source = self._stores[group].rows
                if at_station.all_in_order:
                    found.append(source.index_select(0, at_station.slots).to(self.wire[group]))
                    continue
                rows = source.new_empty((at_station.rows, source.shape[1]), dtype=self.wire[group])
                rows.index_copy_(0, at_station.held, source.index_select(0, at_station.slots).to(rows.dtype))
                if arrived is not None:
                    arrived[group].copy_to(rows, at_station.forwarded)
                found.append(rows)
        return [
            (rows if first.expand is None or not expand else rows.index_select(0, first.expand)).to(store.dtype)
            for rows, first, store in zip(found, route.stations[0], self._stores, strict=True)
        ]

    def reduce(self, route: Route, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sum per group [requests of this rank, dim] gradients of equal rows -> [rows of station 0, dim]."""
        reduced = []
        for first, grad, wide in zip(route.stations[0], grads, self.wide, strict=True):
            if first.expand is None:
                reduced.append(grad.to(wide))
            else:
                total = grad.new_zeros((first.rows, grad.shape[1]), dtype=wide)
                reduced.append(total.index_add_(0, first.expand, grad.to(wide)))
        return reduced

    def push(
        self, route: Route, grads: Sequence[torch.Tensor], piggyback: GradientPiggyback | None = None
    ) -> list[list[tuple[StationRows, torch.Tensor]]]:
        """Collective. Carry per group [rows of station 0, dim] gradients to the ranks that hold the rows.

        Returns:
            Per group and station (rows, gradients [held, dim] of those that this rank holds there).
        """
        held: list[list[tuple[StationRows, torch.Tensor]]] = [[] for _ in self._stores]
        grads = [grad.to(wide) for grad, wide in zip(grads, self.wide, strict=True)]
        for station, at_station in enumerate(route.stations):
            for group, rows in enumerate(at_station):
                here = grads[group] if rows.all_in_order else grads[group].index_select(0, rows.held)
                held[group].append((rows, here))
                if piggyback is not None:
                    piggyback.add(group, rows, here)
            if station == len(self.hops):
                break
            sent, received = route.requested[station], route.served[station]
            columns = [
                Column(grad, rows.forwarded, counts_of_group(g, sent), counts_of_group(g, received), wire)
                for g, (grad, rows, wire) in enumerate(zip(grads, at_station, self.wire, strict=True))
            ]
            if piggyback is not None:
                columns += piggyback.up(station)
            hop = self.hops[station]
            arrived = hop.exchange(columns)
            following = zip(arrived, route.stations[station + 1], self.wide, strict=False)
            grads = [_sum_by_row(rows, next_rows, wide) for rows, next_rows, wide in following]
            if piggyback is not None:
                piggyback.recv_up(station, arrived[len(at_station) :])
        return held

    def merge(self, passes: Sequence[tuple[Route, Sequence[torch.Tensor]]]) -> tuple[Route, list[torch.Tensor]]:
        """Merge passes with their gradients into one route; see ``merge_passes``."""
        return merge_passes(self._lookup, self.hops, self.wide, passes)


def _sum_by_row(arrived: ReceivedRows, rows: StationRows, wide: torch.dtype) -> torch.Tensor:
    """Sum received gradients by row -> [rows, dim].

    Received gradients are added in the order of the peers, then those of this rank: at every tier the gradient of a
    row is the sum of a rank's own and of all received ones, so that every placement rounds alike.
    """
    if rows.expand is None:
        return arrived.whole(wide)
    total = arrived.by_peer[0].new_zeros((rows.rows, arrived.by_peer[0].shape[1]), dtype=wide)
    arrived.add_to(total, rows.expand)
    return total


def _words(arrived: ReceivedRows) -> torch.Tensor:
    return torch.cat(list(arrived.by_peer)).view(-1)


def _check_all_held(away: Sequence[int]) -> None:
    if sum(away):
        raise EmbeddingError(f"{sum(away)} rows were requested from a rank that is not their home")


def _flag(faulty: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return like.new_zeros(1) if faulty is None else faulty.to(like.dtype).view(1)


def _by_rows(keys: torch.Tensor, stations: Sequence[StationRows]) -> tuple[torch.Tensor, ...]:
    return torch.split(keys, [of_group.rows for of_group in stations])
