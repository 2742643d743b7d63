"""Where the rows of one lookup are found: the stations it passes and what each holds.

A request climbs stations (self, node owner, home) joined by hops and stops at the first that holds a copy. The route
remembers, per station and dim-group, which rows were held there and which were asked further on; the forward pass
walks it from the last station to the first, the backward pass from the first to the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from flexd.embedding.exchange import Agreement, Counts, Hop
from flexd.embedding.store import GroupStore
from flexd.embedding.traffic import Traffic
from flexd.errors import EmbeddingError

_COUNT_SHIFT = 44
_KEY_MASK = (1 << _COUNT_SHIFT) - 1
_MAX_COUNT = (1 << (63 - _COUNT_SHIFT)) - 1


@dataclass(frozen=True)
class GroupStop:
    """One dim-group at one station. All tensors are int64 on the store's device.

    Attributes:
        rows: distinct rows dealt with here.
        expand: [requests] -> row; None if every row was requested once, in this order.
        held, slots, entries: rows held here, where they are in the store, and their directory position (-1: a
            plain home row).
        asked: rows asked of the next station, in the order in which they are sent.
    """

    rows: int
    expand: torch.Tensor | None
    held: torch.Tensor
    slots: torch.Tensor
    entries: torch.Tensor
    asked: torch.Tensor


@dataclass(frozen=True)
class Route:
    """``stops[station][group]``; ``asked[station]``, ``asked_of_me[station]`` for the hop after each station."""

    stops: list[list[GroupStop]]
    asked: list[Counts]
    asked_of_me: list[Counts]
    agreement: Agreement


class Router:
    """Finds routes, and carries rows and gradients along them."""

    def __init__(self, stores: Sequence[GroupStore], hops: Sequence[Hop], traffic: Traffic, *, dedup: bool) -> None:
        self._stores = list(stores)
        self._hops = list(hops)
        self.traffic = traffic
        self._dedup = dedup
        self._firsts = [store.group.first_key for store in self._stores]

    def find(self, keys: torch.Tensor, agreement: Agreement) -> Route:
        """Collective. int64 [n] keys wanted by this rank, in any order, repeats allowed.

        Nothing is fetched here when a rank reports a fault, but the sizes still go round, so that every rank learns
        of it.
        """
        stops: list[list[GroupStop]] = []
        asked: list[Counts] = []
        asked_of_me: list[Counts] = []
        ids, weights = keys, None
        for hop in (*self._hops, None):
            here, missing = self._stop(ids, weights)
            stops.append(here)
            if hop is None:
                if len(missing.keys):
                    raise EmbeddingError(f"{len(missing.keys)} rows were asked of a rank that is not their home")
                break
            peer = hop.destination(missing.keys)
            order = torch.argsort(peer, stable=True)
            sizes = torch.bincount(
                peer * len(self._stores) + missing.groups, minlength=hop.peers.size * len(self._stores)
            ).view(hop.peers.size, len(self._stores))
            sent, received, agreement = hop.exchange_sizes(sizes, agreement)
            ids, weights = _unpack(hop.exchange_ids(missing.packed()[order], sent, received))
            positions, groups = missing.positions[order], missing.groups[order]
            for group in range(len(here)):
                rows = positions[groups == group]
                here[group] = replace(here[group], asked=rows)
            asked.append(sent)
            asked_of_me.append(received)
        return Route(stops, asked, asked_of_me, agreement)

    def fetch(self, route: Route, *, expand: bool = True) -> list[torch.Tensor]:
        """Collective. Per group [requests of this rank, dim]; without ``expand`` [rows of the first station, dim]."""
        rows: list[torch.Tensor] = []
        for station in range(len(route.stops) - 1, -1, -1):
            answers = (
                self._hops[station].exchange_rows(rows, route.asked_of_me[station], route.asked[station])
                if station < len(self._hops)
                else None
            )
            rows = []
            for group, stop in enumerate(route.stops[station]):
                source = self._stores[group].rows
                found = source.new_empty((stop.rows, source.shape[1]))
                found.index_copy_(0, stop.held, source.index_select(0, stop.slots))
                if answers is not None:
                    found.index_copy_(0, stop.asked, answers[group])
                repeats = stop.expand if expand or station else None
                rows.append(found if repeats is None else found.index_select(0, repeats))
        return rows

    def reduce(self, route: Route, grads: list[torch.Tensor], station: int = 0) -> list[torch.Tensor]:
        """Per group [requests, dim] gradients -> [rows, dim], those of one row summed."""
        reduced = []
        for stop, grad in zip(route.stops[station], grads, strict=True):
            if stop.expand is None:
                reduced.append(grad)
            else:
                reduced.append(grad.new_zeros((stop.rows, grad.shape[1])).index_add_(0, stop.expand, grad))
        return reduced

    def push(self, route: Route, grads: list[torch.Tensor]) -> list[list[tuple[GroupStop, torch.Tensor]]]:
        """Collective. Per group [rows at station 0, dim] gradients -> per group (stop, gradient of its held rows)."""
        landed: list[list[tuple[GroupStop, torch.Tensor]]] = [[] for _ in self._stores]
        for station, stops in enumerate(route.stops):
            for group, stop in enumerate(stops):
                landed[group].append((stop, grads[group].index_select(0, stop.held)))
            if station == len(self._hops):
                break
            onward = [grads[group].index_select(0, stop.asked) for group, stop in enumerate(stops)]
            arrived = self._hops[station].exchange_rows(onward, route.asked[station], route.asked_of_me[station])
            grads = self.reduce(route, arrived, station + 1)
        return landed

    def _stop(self, ids: torch.Tensor, weights: torch.Tensor | None) -> tuple[list[GroupStop], _Missing]:
        """Looks the requested keys up in this rank's stores."""
        if weights is None:
            weights = torch.ones_like(ids)
        if self._dedup:
            keys, inverse = torch.unique(ids, return_inverse=True)
            counts = torch.zeros_like(keys).scatter_add_(0, inverse, weights)
        else:
            order = torch.argsort(self._group_of(ids), stable=True)
            keys, inverse, counts = ids[order], torch.argsort(order), weights[order]
        stops = []
        missing = []
        for at, expand, store in self._by_group(keys, inverse):
            mine, weight = keys[at], counts[at]
            held, slots, entries = store.locate(mine)
            where = held.nonzero().view(-1)
            absent = (~held).nonzero().view(-1)
            stop = GroupStop(len(mine), expand if self._dedup else None, where, slots[where], entries[where], absent)
            self._count_accesses(store, stop.entries, weight[where])
            stops.append(stop)
            missing.append((mine[absent], weight[absent], absent))
        return stops, _Missing.of(missing)

    def _by_group(self, keys: torch.Tensor, inverse: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, GroupStore]]:
        """Per dim-group: (its part of ``keys``, [requests of the group] -> row of the group, store).

        ``keys`` stand group by group, so a group's requests are those whose row lies between two bounds.
        """
        if len(self._stores) == 1:
            yield slice(None), inverse, self._stores[0]
            return
        start = 0
        sizes = torch.bincount(self._group_of(keys), minlength=len(self._stores)).tolist()
        for store, size in zip(self._stores, sizes, strict=True):
            requests = ((inverse >= start) & (inverse < start + size)).nonzero().view(-1)
            yield slice(start, start + size), inverse.index_select(0, requests).sub_(start), store
            start += size

    def _group_of(self, keys: torch.Tensor) -> torch.Tensor:
        firsts = torch.tensor(self._firsts, dtype=torch.int64, device=keys.device)
        return torch.searchsorted(firsts, keys, right=True) - 1

    def _count_accesses(self, store: GroupStore, entries: torch.Tensor, weight: torch.Tensor) -> None:
        if len(store.directory):
            tier = torch.where(entries >= 0, store.directory.tiers_at(entries.clamp(min=0)), 0)
        else:
            tier = torch.zeros_like(entries)
        by_tier = torch.zeros(3, dtype=torch.int64, device=weight.device).scatter_add_(0, tier.to(torch.int64), weight)
        home, node, device = by_tier.tolist()
        self.traffic.home_accesses += home
        self.traffic.node_accesses += node
        self.traffic.device_accesses += device


@dataclass(frozen=True)
class _Missing:
    """Rows a station does not hold, ascending by key within each group and group by group."""

    keys: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor
    groups: torch.Tensor

    @staticmethod
    def of(parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> _Missing:
        groups = torch.cat([torch.full_like(part[0], group) for group, part in enumerate(parts)])
        keys, counts, positions = (torch.cat(column) for column in zip(*parts, strict=True))
        return _Missing(keys, counts, positions, groups)

    def packed(self) -> torch.Tensor:
        """Key in the low 44 bits, accesses behind it above: the next station can count accesses for no extra byte."""
        return self.keys | (self.counts.clamp(max=_MAX_COUNT) << _COUNT_SHIFT)


def _unpack(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return packed & _KEY_MASK, packed >> _COUNT_SHIFT
