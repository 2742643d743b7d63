"""Several passes of a step merged into one route."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexd.embedding import devices
from flexd.embedding.exchange.hop import Hop, host_numbers
from flexd.embedding.exchange.route import Route, StationRows, counts_of_group
from flexd.embedding.exchange.station_lookup import StationLookup


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
    groups = range(lookup.groups)
    ids = torch.cat([route.keys[0][g] for g in groups for route in routes])
    numbers = [sum(len(route.keys[0][g]) for route in routes) for g in groups]
    stations: list[tuple[StationRows, ...]] = []
    all_keys, requested, served = [], [], []
    for station, hop in enumerate((*hops, None)):
        located = lookup.locate(ids, None, hop, sort=True)
        peers = 1 if hop is None else hop.peers.size
        if hop is None:
            sizes = host_numbers(located.sections)
        else:
            ids_served, served_sizes = _union_served(lookup, routes, station, peers)
            both = host_numbers(torch.cat([located.sections, served_sizes]))
            sizes, of_served = both[: len(located.sections)], both[len(located.sections) :]
        away = lookup.split_sections(sizes, peers).away
        stations.append(lookup.stations(located, sizes, peers, numbers))
        all_keys.append(lookup.numbered_keys(located, stations[0]) if station == 0 else ids.split_with_sizes(numbers))
        if hop is None:
            break
        by_group = of_served.reshape(lookup.groups, peers)
        requested.append(away.T)
        served.append(by_group.T)
        ids, numbers = ids_served, by_group.sum(axis=1).tolist()
    total = []
    for group, (first, dtype) in enumerate(zip(stations[0], wide, strict=True)):
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
