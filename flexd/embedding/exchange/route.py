"""Routes of look-ups: the rows that each station on the way holds, and the rows that it requests from the next."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flexd.embedding.exchange.hop import Agreement, Counts, Hop, as_counts
from flexd.embedding.store.store import GroupStore

COUNT_SHIFT = 44
"""A request is a key in the lower bits and its number of accesses in the bits above."""
_MAX_COUNT = (1 << (63 - COUNT_SHIFT)) - 1
_FEW_PEERS = 8
MAX_TABLE_ROWS = 2**22
"""``Dedup`` sorts in larger dim-groups: its table (8 bytes a row) would take too much memory."""


@dataclass(frozen=True)
class StationRows:
    """Rows of one dim-group at one station. All tensors are int64 on the store's device.

    Attributes:
        rows: number of distinct rows requested at the station.
        expand: [requests] -> row; None if every row was requested once, in this order.
        held: rows that this rank holds.
        slots: their slots in the store.
        positions: their directory positions; -1 for a plain home row.
        forwarded: rows requested from the next station, in the order in which they are sent.
    """

    rows: int
    expand: torch.Tensor | None
    held: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    forwarded: torch.Tensor


@dataclass(frozen=True)
class Route:
    """Where the rows of one look-up are.

    Attributes:
        stations: ``[station][group]``.
        requested: for the hop after each station, the rows requested from each peer.
        served: for the hop after each station, the rows that each peer requests here.
        agreement: combined over all ranks.
        keys: ``[station][group]`` int64: at the first station the keys of its rows, at later ones the requested keys in
            the order of their arrival.
    """

    stations: tuple[tuple[StationRows, ...], ...]
    requested: tuple[Counts, ...]
    served: tuple[Counts, ...]
    agreement: Agreement
    keys: tuple[tuple[torch.Tensor, ...], ...]


class Dedup:
    """Finds the distinct keys of one dim-group, without sorting where a table of its rows is small enough. Thread-safe.

    Args:
        first, rows: keys lie in [first, first + rows).
    """

    def __init__(self, first: int, rows: int, device: torch.device) -> None:
        self._first = first
        self._lock = threading.Lock()
        # Its content between calls is irrelevant: every place is written before it is read.
        self._table = torch.empty(rows, dtype=torch.int64, device=device) if rows <= MAX_TABLE_ROWS else None

    @property
    def nbytes(self) -> int:
        """Bytes held between steps."""
        return 0 if self._table is None else self._table.nbytes

    def unique(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """int64 [n] keys -> (int64 [m] distinct keys, int64 [n] place of each key among them).

        The places are None if all keys are distinct; then the distinct keys are the keys as given.
        """
        if self._table is None:
            distinct, places = torch.unique(keys, return_inverse=True)
            return (keys, None) if len(distinct) == len(keys) else (distinct, places)
        at = keys - self._first if self._first else keys
        number = torch.arange(len(keys), device=keys.device)
        with self._lock:
            table = self._table
            # The last writer among equal keys represents them all.
            table.scatter_(0, at, number)
            chosen = (table.index_select(0, at) == number).nonzero().view(-1)
            if len(chosen) == len(keys):
                return keys, None
            table.scatter_(0, at.index_select(0, chosen), number[: len(chosen)])
            return keys.index_select(0, chosen), table.index_select(0, at)


class StationLookup:
    """Looks requested keys up in the stores of this rank.

    Args:
        dedup: request each row once.
    """

    def __init__(self, stores: Sequence[GroupStore], *, dedup: bool) -> None:
        self.stores = list(stores)
        self._deduplicates = dedup
        self._dedup = [Dedup(store.group.first_key, store.group.rows, store.rows.device) for store in stores]

    @property
    def working_bytes(self) -> int:
        """Bytes of the tables that find distinct keys."""
        return sum(dedup.nbytes for dedup in self._dedup)

    def locate(
        self, group: int, ids: torch.Tensor, weights: torch.Tensor | None, *, dedup: bool | None = None
    ) -> tuple[StationRows, torch.Tensor, torch.Tensor]:
        """Look int64 [n] requested keys up, each with its number of accesses (None: 1).

        Returns:
            (the rows, with ``forwarded`` not yet ordered by peer; int64 [rows] keys; int64 [rows] accesses).
        """
        store = self.stores[group]
        keys, expand = self._dedup[group].unique(ids) if self._deduplicates or dedup else (ids, None)
        if expand is None:
            counts = torch.ones_like(keys) if weights is None else weights
        elif weights is None:
            counts = torch.bincount(expand, minlength=len(keys))
        else:
            counts = torch.zeros_like(keys).scatter_add_(0, expand, weights)
        held, slots, positions = store.locate(keys)
        here, absent = held.nonzero().view(-1), (~held).nonzero().view(-1)
        slots, positions = slots.index_select(0, here), positions.index_select(0, here)
        return StationRows(len(keys), expand, here, slots, positions, absent), keys, counts.clamp_(max=_MAX_COUNT)

    def order_by_peer(
        self, hop: Hop, stations: Sequence[StationRows], keys: Sequence[torch.Tensor], *, by_key: bool = False
    ) -> tuple[tuple[StationRows, ...], torch.Tensor]:
        """Order the forwarded rows by peer (and key, if ``by_key``); and count them: int64 [peers, groups]."""
        ordered, sizes = [], []
        for at_station, of_group in zip(stations, keys, strict=True):
            forwarded = at_station.forwarded
            if by_key:
                forwarded = forwarded.index_select(0, torch.argsort(of_group.index_select(0, forwarded)))
            peer = hop.destination(of_group.index_select(0, forwarded))
            if hop.peers.size <= _FEW_PEERS:
                order = torch.cat([(peer == number).nonzero().view(-1) for number in range(hop.peers.size)])
            else:
                order = torch.argsort(peer, stable=True)
            ordered.append(replace(at_station, forwarded=forwarded.index_select(0, order)))
            sizes.append(torch.bincount(peer, minlength=hop.peers.size))
        return tuple(ordered), torch.stack(sizes, dim=1)


def merge_passes(
    lookup: StationLookup,
    hops: Sequence[Hop],
    wide: Sequence[torch.dtype],
    passes: Sequence[tuple[Route, Sequence[torch.Tensor]]],
) -> tuple[Route, list[torch.Tensor]]:
    """Merge passes over one placement into one route with every row once, and sum the gradients of each row.

    A step then pushes every row's gradient once. Nothing is exchanged: both ends of a hop have the requests of each
    pass, and order their union by key.

    Args:
        wide: dtype of each dim-group in which gradients are added.
        passes: routes, and per group [rows of the first station, dim] gradients.
    """
    if len(passes) == 1:
        return passes[0][0], list(passes[0][1])
    routes = [route for route, _ in passes]
    ids = [torch.cat([route.keys[0][g] for route in routes]) for g in range(len(lookup.stores))]
    stations, all_keys, requested, served = [], [], [], []
    for station, hop in enumerate((*hops, None)):
        located = [lookup.locate(group, of_group, None, dedup=True) for group, of_group in enumerate(ids)]
        at_station, keys = tuple(rows for rows, _, _ in located), [keys for _, keys, _ in located]
        all_keys.append(tuple(keys if station == 0 else ids))
        if hop is None:
            stations.append(at_station)
            break
        at_station, sizes = lookup.order_by_peer(hop, at_station, keys, by_key=True)
        stations.append(at_station)
        ids, sizes_served = _union_served(lookup.stores, routes, station, hop.peers.size)
        of_hop = torch.stack([sizes, sizes_served]).tolist()
        requested.append(as_counts(of_hop[0]))
        served.append(as_counts(of_hop[1]))
    total = []
    for group, (first, dtype) in enumerate(zip(stations[0], wide, strict=True)):
        parts = [grads[group].to(dtype) for _, grads in passes]
        if first.expand is None:
            total.append(torch.cat(parts))
            continue
        total.append(parts[0].new_zeros((first.rows, parts[0].shape[1])))
        for part, at in zip(parts, torch.split(first.expand, [len(part) for part in parts]), strict=True):
            total[group].index_add_(0, at, part)
    merged = Route(tuple(stations), tuple(requested), tuple(served), routes[-1].agreement, tuple(all_keys))
    return merged, total


def _union_served(
    stores: Sequence[GroupStore], routes: Sequence[Route], station: int, peers: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Unite the requests that each peer made in any pass over the hop after a station.

    Returns:
        (per group the keys ordered by peer and key; int64 [peers, groups] their numbers).
    """
    ids, sizes = [], []
    for group, store in enumerate(stores):
        rows, first = store.group.rows, store.group.first_key
        by_peer: list[torch.Tensor] = []
        for peer in range(peers):
            keys = [split_by_peer(r.keys[station + 1][group], r.served[station], group)[peer] for r in routes]
            by_peer.append(torch.cat(keys) - first + peer * rows)
        distinct = torch.unique(torch.cat(by_peer))
        ids.append(distinct % rows + first)
        sizes.append(torch.bincount(distinct // rows, minlength=peers))
    return ids, torch.stack(sizes, dim=1)


def counts_of_group(group: int, counts: Counts) -> list[int]:
    """Return the counts of one dim-group by peer."""
    return [row[group] for row in counts]


def split_by_peer(column: torch.Tensor, counts: Counts, group: int) -> tuple[torch.Tensor, ...]:
    """Split a tensor of one dim-group that is ordered by peer."""
    return torch.split(column, counts_of_group(group, counts))
