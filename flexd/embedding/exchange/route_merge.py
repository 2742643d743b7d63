"""Several forward passes over one placement as one, so that a step pushes every row's gradient once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexd.embedding.exchange.hop import Hop
from flexd.embedding.exchange.station import Route, Stations, split
from flexd.embedding.store.store import GroupStore


def merged(
    stations: Stations,
    hops: Sequence[Hop],
    wide: Sequence[torch.dtype],
    passes: Sequence[tuple[Route, list[torch.Tensor]]],
) -> tuple[Route, list[torch.Tensor]]:
    """Passes over one placement as one, with every row once, and its gradients. Nothing is exchanged: both ends of
    a hop know what was asked in each pass, and put the union in the order of the keys.

    Args:
        passes: routes, and per group [rows of the first station, dim] gradients.
    """
    if len(passes) == 1:
        return passes[0]
    routes = [route for route, _ in passes]
    whole = Route([], [], [], routes[-1].agreement, [], None)
    ids = [torch.cat([route.requests[0][g] for route in routes]) for g in range(len(stations.stores))]
    for station, hop in enumerate((*hops, None)):
        stops, keys = [], []
        for group, of_group in enumerate(ids):
            stop, keys_of, _ = stations.stop(group, of_group, None, dedup=True)
            stops.append(stop)
            keys.append(keys_of)
        whole.stops.append(stops)
        whole.requests.append(keys if station == 0 else ids)
        if hop is None:
            break
        whole.stops[-1], sizes = stations.by_peer(hop, stops, keys, in_order=True)
        ids, sizes_of_me = _asked_of_me(stations.stores, routes, station, hop.peers.size)
        sent, received = torch.stack([sizes, sizes_of_me]).tolist()
        whole.asked.append(sent)
        whole.asked_of_me.append(received)
    total = []
    for group, (stop, dtype) in enumerate(zip(whole.stops[0], wide, strict=True)):
        parts = [grads[group].to(dtype) for _, grads in passes]
        if stop.expand is None:
            total.append(torch.cat(parts))
            continue
        total.append(parts[0].new_zeros((stop.rows, parts[0].shape[1])))
        for part, at in zip(parts, torch.split(stop.expand, [len(part) for part in parts]), strict=True):
            total[group].index_add_(0, at, part)
    return whole, total


def _asked_of_me(
    stores: Sequence[GroupStore], routes: Sequence[Route], station: int, peers: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What each peer asked over the hop after a station in any pass: per group keys ordered by peer and key, and
    int64 [peers, groups] how many."""
    ids, sizes = [], []
    for group, store in enumerate(stores):
        rows, first = store.group.rows, store.group.first_key
        by_peer: list[torch.Tensor] = []
        for peer in range(peers):
            asked = [
                split(route.requests[station + 1][group], route.asked_of_me[station], group)[peer] for route in routes
            ]
            by_peer.append(torch.cat(asked) - first + peer * rows)
        distinct = torch.unique(torch.cat(by_peer))
        ids.append(distinct % rows + first)
        sizes.append(torch.bincount(distinct // rows, minlength=peers))
    return ids, torch.stack(sizes, dim=1)
