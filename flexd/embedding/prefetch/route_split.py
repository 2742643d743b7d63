"""Cuts routes in two by a mark that the holders of the rows set: one bit a row travels back along the route."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from flexd.embedding.exchange.hop import Counts, Hop
from flexd.embedding.exchange.process_groups import Peers
from flexd.embedding.exchange.station import GroupStop, Route

Marks = list[list[torch.Tensor]]
"""``[station][group]``: bool [rows] of the station."""


@dataclass(frozen=True)
class Cut:
    """A route as two, which share no row. What passes along one needs no word of the other.

    Attributes:
        marked, rest: routes whose first station expands nothing: [requests] are its rows.
        marked_rows, rest_rows: per group int64 places of those rows among the rows of the whole route's first station.
    """

    marked: Route
    rest: Route
    marked_rows: list[torch.Tensor]
    rest_rows: list[torch.Tensor]

    def divide(self, rows: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Per group [rows of the first station, dim] -> those of the marked rows, those of the rest."""
        marked, rest = (
            [part.index_select(0, at) for part, at in zip(rows, places, strict=True)]
            for places in (self.marked_rows, self.rest_rows)
        )
        return marked, rest


def carry_marks(hops: Sequence[Hop], routes: Sequence[Route], flags: Sequence[Marks]) -> list[Marks]:
    """Collective. Tells each station which of its rows their holder has marked.

    Args:
        flags: per route ``[station][group]``: bool [held] for the rows held at the station.

    Returns:
        per route the marks of all its rows.
    """
    stations = len(hops) + 1
    marks: list[Marks] = [[[] for _ in range(stations)] for _ in routes]
    for station in reversed(range(stations)):
        for route, of_route, of_held in zip(routes, marks, flags, strict=True):
            for stop, flag in zip(route.stops[station], of_held[station], strict=True):
                of_route[station].append(flag.new_zeros(stop.rows).index_copy_(0, stop.held, flag))
        if station < len(hops):
            answers = _bits_back(hops[station].peers, routes, marks, station)
            for route, of_route, answer in zip(routes, marks, answers, strict=True):
                for stop, mark, bits in zip(route.stops[station], of_route[station], answer, strict=True):
                    mark.index_copy_(0, stop.asked, bits)
    return marks


def cut(route: Route, marks: Marks) -> Cut:
    """Local: ``route`` by the marks of its rows, as ``carry_marks`` gave them on every rank."""
    groups = range(len(route.stops[0]))
    stations = range(len(route.stops))
    sent = [[marks[s][g][route.stops[s][g].asked] for g in groups] for s in stations[:-1]]
    answered = [[_requests(route.stops[s + 1][g], marks[s + 1][g]) for g in groups] for s in stations[:-1]]
    rows = [[mark.sum() for mark in marks[s]] for s in stations]
    # One transfer to the host for all sizes.
    sizes = iter(
        torch.cat(
            [
                *(torch.stack(of_station) for of_station in rows),
                *(
                    _sums(bits, [peer[group] for peer in counts])
                    for all_bits, all_counts in ((sent, route.asked), (answered, route.asked_of_me))
                    for of_hop, counts in zip(all_bits, all_counts, strict=True)
                    for group, bits in enumerate(of_hop)
                ),
            ]
        ).tolist()
    )
    marked_sizes = [[next(sizes) for _ in groups] for _ in stations]
    asked, asked_of_me = (
        [_transposed([[next(sizes) for _ in counts] for _ in groups]) for counts in all_counts]
        for all_counts in (route.asked, route.asked_of_me)
    )
    marked = Route(
        [[_part(route, s, g, marks[s][g], marked_sizes[s][g]) for g in groups] for s in stations],
        asked,
        asked_of_me,
        route.agreement,
        [[_keys(route, s, g, marks[s][g]) for g in groups] for s in stations],
    )
    rest = Route(
        [
            [_part(route, s, g, ~marks[s][g], route.stops[s][g].rows - marked_sizes[s][g]) for g in groups]
            for s in stations
        ],
        [_minus(whole, part) for whole, part in zip(route.asked, asked, strict=True)],
        [_minus(whole, part) for whole, part in zip(route.asked_of_me, asked_of_me, strict=True)],
        route.agreement,
        [[_keys(route, s, g, ~marks[s][g]) for g in groups] for s in stations],
    )
    return Cut(
        marked,
        rest,
        [mark.nonzero().view(-1) for mark in marks[0]],
        [(~mark).nonzero().view(-1) for mark in marks[0]],
    )


def _part(route: Route, station: int, group: int, chosen: torch.Tensor, rows: int) -> GroupStop:
    """The chosen rows of one stop, numbered anew in the same order."""
    stop = route.stops[station][group]
    place = chosen.cumsum(0) - 1
    held = chosen[stop.held]
    expand = None
    if station and stop.expand is not None:
        expand = place[stop.expand[chosen[stop.expand]]]
    return GroupStop(
        rows,
        expand,
        place[stop.held[held]],
        stop.slots[held],
        stop.entries[held],
        place[stop.asked[chosen[stop.asked]]],
    )


def _keys(route: Route, station: int, group: int, chosen: torch.Tensor) -> torch.Tensor:
    """``Route.requests`` of the chosen rows of one stop."""
    return route.requests[station][group][_requests(route.stops[station][group], chosen) if station else chosen]


def _requests(stop: GroupStop, marks: torch.Tensor) -> torch.Tensor:
    return marks if stop.expand is None else marks.index_select(0, stop.expand)


def _sums(bits: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """int64 [peers]: marked ones of each peer's part of ``bits``."""
    if sum(counts) == 0:
        return torch.zeros(len(counts), dtype=torch.int64, device=bits.device)
    total = torch.nn.functional.pad(bits.cumsum(0), (1, 0))
    bounds = torch.tensor([0, *accumulate(counts)], device=bits.device)
    return total[bounds].diff()


def _transposed(rows: list[list[int]]) -> Counts:
    return [list(column) for column in zip(*rows, strict=True)]


def _minus(whole: Counts, part: Counts) -> Counts:
    return [[a - b for a, b in zip(*rows, strict=True)] for rows in zip(whole, part, strict=True)]


def _bits_back(peers: Peers, routes: Sequence[Route], marks: Sequence[Marks], station: int) -> list[list[torch.Tensor]]:
    """Collective. Answers the requests that arrived over the hop after ``station``: per route and group bool
    [asked]."""
    columns = [
        _requests(stop, mark)
        for route, of_route in zip(routes, marks, strict=True)
        for stop, mark in zip(route.stops[station + 1], of_route[station + 1], strict=True)
    ]
    to_send = _beside([route.asked_of_me[station] for route in routes])
    to_receive = _beside([route.asked[station] for route in routes])
    received = _exchange_bits(peers, columns, to_send, to_receive)
    groups = len(routes[0].stops[0])
    return [received[first : first + groups] for first in range(0, len(received), groups)]


def _beside(counts: Sequence[Counts]) -> Counts:
    """[peers][columns] of several routes."""
    return [[number for row in rows for number in row] for rows in zip(*counts, strict=True)]


def _exchange_bits(
    peers: Peers, columns: Sequence[torch.Tensor], to_send: Counts, to_receive: Counts
) -> list[torch.Tensor]:
    """Columns bool [n] ordered by peer -> columns received, eight rows a byte."""
    parts = [torch.split(column, [row[index] for row in to_send]) for index, column in enumerate(columns)]
    ordered = torch.cat([part[peer] for peer in range(peers.size) for part in parts])
    sent, received = ([sum(row) for row in counts] for counts in (to_send, to_receive))
    bytes_sent, bytes_received = ([-(-bits // 8) for bits in sizes] for sizes in (sent, received))
    device = ordered.device
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=device)
    padded = torch.zeros(8 * sum(bytes_sent), dtype=torch.uint8, device=device)
    padded[_without_padding(sent, device)] = ordered.to(torch.uint8)
    packed = (padded.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)
    arrived = peers.all_to_all(packed, bytes_sent, bytes_received)
    bits = (arrived.unsqueeze(1) & weights).ne(0).view(-1)[_without_padding(received, device)]
    pieces = torch.split(bits, [number for row in to_receive for number in row])
    width = len(columns)
    return [torch.cat(pieces[index::width]) for index in range(width)]


def _without_padding(sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [sum of sizes]: where the bits of each peer stand when every peer's part begins at a whole byte."""
    starts = [0, *accumulate(8 * -(-size // 8) for size in sizes)][:-1]
    ends = [0, *accumulate(sizes)]
    shift = torch.tensor([start - end for start, end in zip(starts, ends, strict=False)], device=device)
    lengths = torch.tensor([b - a for a, b in pairwise(ends)], device=device)
    return torch.arange(ends[-1], device=device) + shift.repeat_interleave(lengths, output_size=ends[-1])
