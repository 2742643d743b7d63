"""Splits routes in two by a mark that the holders of the rows set: one bit a row travels back along the route."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from flexd.embedding import devices
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.exchange.hop import Counts, Hop, with_parts_transposed
from flexd.embedding.exchange.route import Route, StationRows, counts_of_group

Marks = list[list[torch.Tensor]]
"""``[station][group]``: bool [rows] of the station."""


@dataclass(frozen=True)
class RouteSplit:
    """A route as two that share no row. Exchanges along one need nothing of the other.

    Attributes:
        marked, rest: routes whose first station expands nothing: [requests] are its rows.
        marked_rows, rest_rows: per group int64 places of those rows among the rows of the whole route's first station.
    """

    marked: Route
    rest: Route
    marked_rows: list[torch.Tensor]
    rest_rows: list[torch.Tensor]

    def split_rows(self, rows: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Per group [rows of the first station, dim] -> those of the marked rows, those of the rest."""
        marked, rest = (
            [part.index_select(0, at) for part, at in zip(rows, places, strict=True)]
            for places in (self.marked_rows, self.rest_rows)
        )
        return marked, rest


def exchange_marks(hops: Sequence[Hop], routes: Sequence[Route], flags: Sequence[Marks]) -> list[Marks]:
    """Collective. Send each station the marks that the holders of its rows have set.

    Args:
        flags: per route ``[station][group]``: bool [held] for the rows held at the station.

    Returns:
        per route the marks of all its rows.
    """
    stations = len(hops) + 1
    marks: list[Marks] = [[[] for _ in range(stations)] for _ in routes]
    for station in reversed(range(stations)):
        for route, of_route, of_held in zip(routes, marks, flags, strict=True):
            for rows, flag in zip(route.stations[station], of_held[station], strict=True):
                of_route[station].append(torch.nn.functional.pad(flag, (0, rows.rows - rows.held)))
        if station < len(hops):
            received = _marks_of_served(hops[station].peers, routes, marks, station)
            for route, of_route, of_groups in zip(routes, marks, received, strict=True):
                for rows, mark, bits in zip(route.stations[station], of_route[station], of_groups, strict=True):
                    mark[rows.held :] = bits
    return marks


def split_route(route: Route, marks: Marks) -> RouteSplit:
    """Split a route by the marks of its rows, as ``exchange_marks`` returned them on every rank. Local."""
    groups = range(len(route.stations[0]))
    stations = range(len(route.stations))
    requested_marks = [[marks[s][g][route.stations[s][g].held :] for g in groups] for s in stations[:-1]]
    served_marks = [[_of_requests(route.stations[s + 1][g], marks[s + 1][g]) for g in groups] for s in stations[:-1]]
    rows = [[mark.sum() for mark in marks[s]] for s in stations]
    # One transfer to the host for all sizes.
    sizes = iter(
        torch.cat(
            [
                *(torch.stack(of_station) for of_station in rows),
                *(torch.stack([marks[s][g][: route.stations[s][g].plain].sum() for g in groups]) for s in stations),
                *(
                    _sums(bits, counts_of_group(group, counts))
                    for all_bits, all_counts in ((requested_marks, route.requested), (served_marks, route.served))
                    for of_hop, counts in zip(all_bits, all_counts, strict=True)
                    for group, bits in enumerate(of_hop)
                ),
            ]
        ).tolist()
    )
    marked_sizes = [[next(sizes) for _ in groups] for _ in stations]
    marked_plain = [[next(sizes) for _ in groups] for _ in stations]
    requested, served = (
        tuple(np.array([[next(sizes) for _ in counts] for _ in groups], dtype=np.int64).T for counts in all_counts)
        for all_counts in (route.requested, route.served)
    )
    rest_sizes = [[route.stations[s][g].rows - marked_sizes[s][g] for g in groups] for s in stations]
    rest_plain = [[route.stations[s][g].plain - marked_plain[s][g] for g in groups] for s in stations]
    rest_marks = [[~mark for mark in of_station] for of_station in marks]
    marked = _part(route, marks, marked_sizes, marked_plain, requested, served)
    rest = _part(
        route,
        rest_marks,
        rest_sizes,
        rest_plain,
        tuple(whole - part for whole, part in zip(route.requested, requested, strict=True)),
        tuple(whole - part for whole, part in zip(route.served, served, strict=True)),
    )
    places = (
        [_places(mark, size) for mark, size in zip(of_first, of_sizes, strict=True)]
        for of_first, of_sizes in ((marks[0], marked_sizes[0]), (rest_marks[0], rest_sizes[0]))
    )
    return RouteSplit(marked, rest, *places)


def _part(
    route: Route,
    chosen: Marks,
    sizes: list[list[int]],
    plain: list[list[int]],
    requested: tuple[Counts, ...],
    served: tuple[Counts, ...],
) -> Route:
    groups = range(len(route.stations[0]))
    stations = range(len(route.stations))
    forwarded = [counts.sum(axis=0).tolist() for counts in requested] + [[0 for _ in groups]]
    requests = [sizes[0], *(counts.sum(axis=0).tolist() for counts in served)]
    return Route(
        tuple(
            tuple(
                _part_of_station(
                    route.stations[s][g], chosen[s][g], sizes[s][g], plain[s][g], forwarded[s][g],
                    requests[s][g] if s else None,
                )
                for g in groups
            )
            for s in stations
        ),
        requested,
        served,
        route.agreement,
        tuple(tuple(_keys(route, s, g, chosen[s][g], requests[s][g]) for g in groups) for s in stations),
    )  # fmt: skip


def _part_of_station(
    whole: StationRows, chosen: torch.Tensor, rows: int, plain: int, forwarded: int, requests: int | None
) -> StationRows:
    """Return the chosen rows of one dim-group at one station, renumbered in the same order.

    Args:
        rows, plain, forwarded: numbers of the chosen rows.
        requests: number of the requests for them; None: the station expands nothing.
    """
    expand = None
    if requests is not None and whole.expand is not None:
        place = chosen.cumsum(0) - 1
        kept = _places(chosen.index_select(0, whole.expand), requests)
        expand = place.index_select(0, whole.expand.index_select(0, kept))
    held = _places(chosen[: whole.held], rows - forwarded)
    slots, entries = whole.slots.index_select(0, held), whole.entries.index_select(0, held)
    return StationRows(rows, expand, rows - forwarded, slots, entries, plain)


def _places(chosen: torch.Tensor, number: int) -> torch.Tensor:
    """bool [n] with ``number`` of True -> int64 [number] places of True. The host does not wait for the device."""
    return torch.nonzero_static(chosen, size=number).view(-1)


def _keys(route: Route, station: int, group: int, chosen: torch.Tensor, requests: int) -> torch.Tensor:
    """Return ``Route.keys`` of the chosen rows of one dim-group at one station."""
    bits = _of_requests(route.stations[station][group], chosen) if station else chosen
    return route.keys[station][group].index_select(0, _places(bits, requests))


def _of_requests(rows: StationRows, marks: torch.Tensor) -> torch.Tensor:
    """bool [rows] marks -> bool [requests]."""
    return marks if rows.expand is None else marks.index_select(0, rows.expand)


def _sums(bits: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Count the marks in each peer's part of ``bits``: int64 [peers]."""
    if sum(counts) == 0:
        return torch.zeros(len(counts), dtype=torch.int64, device=bits.device)
    total = torch.nn.functional.pad(bits.cumsum(0), (1, 0))
    bounds = devices.uploaded([0, *accumulate(counts)], bits.device)
    return total[bounds].diff()


def _marks_of_served(
    peers: Peers, routes: Sequence[Route], marks: Sequence[Marks], station: int
) -> list[list[torch.Tensor]]:
    """Collective. Send the marks of the rows that were requested over the hop after ``station``; return per route and
    group bool [forwarded] marks of the rows that this rank requested."""
    columns = [
        _of_requests(rows, mark)
        for route, of_route in zip(routes, marks, strict=True)
        for rows, mark in zip(route.stations[station + 1], of_route[station + 1], strict=True)
    ]
    to_send = np.concatenate([route.served[station] for route in routes], axis=1)
    to_receive = np.concatenate([route.requested[station] for route in routes], axis=1)
    received = _exchange_bits(peers, columns, to_send, to_receive)
    groups = len(routes[0].stations[0])
    return [received[first : first + groups] for first in range(0, len(received), groups)]


def _exchange_bits(
    peers: Peers, columns: Sequence[torch.Tensor], to_send: Counts, to_receive: Counts
) -> list[torch.Tensor]:
    """Exchange bool [n] columns ordered by peer, eight rows per byte; return the received columns."""
    # With a further column: what fills the last byte of each peer.
    sent, received = (np.column_stack([counts, -counts.sum(axis=1) % 8]) for counts in (to_send, to_receive))
    device = columns[0].device
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=device)
    fill = torch.zeros(int(sent[:, -1].sum()), dtype=torch.bool, device=device)
    ordered = with_parts_transposed(torch.cat([*columns, fill]), sent.T)
    packed = (ordered.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)
    arrived = peers.all_to_all(packed, *((counts.sum(axis=1) // 8).tolist() for counts in (sent, received)))
    bits = (arrived.unsqueeze(1) & weights).ne(0).view(-1)
    return list(with_parts_transposed(bits, received).split_with_sizes(received.sum(axis=0).tolist())[:-1])
