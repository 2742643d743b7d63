"""Where the rows of one lookup are found: the stations it passes and what each holds.

A request climbs stations (self, node owner, home) joined by hops and stops at the first that holds a copy. The route
remembers, per station and dim-group, which rows were held there and which were asked further on; the forward pass
walks it from the last station to the first, the backward pass from the first to the last.

On a GPU the host waits for the device once a station and dim-group for each of: the number of distinct rows, of rows
held, and of rows not held; once a hop for the sizes; once a pass for the accesses by tier. Carrying rows and gradients
waits for nothing, except once a step for the numbers of touched replicas (``ReplicaSums``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch

from flexd.core.errors import EmbeddingError
from flexd.core.layout import RankLayout
from flexd.embedding.exchange.hop import Agreement, Column, Counts, Hop, Note
from flexd.embedding.exchange.route_merge import merged
from flexd.embedding.exchange.sent_bytes import Kind, Traffic
from flexd.embedding.exchange.station import COUNT_SHIFT, GroupStop, Route, Stations, rows_of, split
from flexd.embedding.replicas.listing import Listing
from flexd.embedding.replicas.replica_sync import ReplicaSums, Touched
from flexd.embedding.store.store import TORCH_DTYPES, GroupStore

_KEY_MASK = (1 << COUNT_SHIFT) - 1


class Router:
    """Finds routes, and carries rows and gradients along them.

    Args:
        dedup: ask for each row once a station.
        comm_dtype: of rows and gradients on the wire; None: each table's own. Gradients are added in float32, or in the
            wider of table and wire. With a narrower wire every row is rounded when it is read, wherever it is held, so
            that what is learned does not depend on the placement.

    Raises:
        EmbeddingError: an unknown ``comm_dtype``.
    """

    def __init__(
        self,
        stores: Sequence[GroupStore],
        hops: Sequence[Hop],
        layout: RankLayout,
        traffic: Traffic,
        *,
        dedup: bool,
        comm_dtype: str | None = None,
    ) -> None:
        if comm_dtype not in (None, "float32", "float16", "bfloat16"):
            raise EmbeddingError(f"comm_dtype {comm_dtype!r}", remedy="one of float32, float16, bfloat16, or None")
        self._stores = list(stores)
        self.hops = list(hops)
        self._layout = layout
        self.traffic = traffic
        self._stations = Stations(stores, dedup=dedup)
        self._firsts = [store.group.first_key for store in self._stores]
        self.wire = [store.dtype if comm_dtype is None else TORCH_DTYPES[comm_dtype] for store in self._stores]
        """Of each dim-group."""
        self.wide = [
            torch.promote_types(torch.promote_types(store.dtype, wire), torch.float32)
            for store, wire in zip(self._stores, self.wire, strict=True)
        ]
        """In what gradients of each dim-group are added."""
        self._listing: Listing | None = None
        self._listed: list[object] = []

    @property
    def working_bytes(self) -> int:
        """Of the tables that find distinct keys, and of what is listed for replicas."""
        listed = 0 if self._listing is None else self._listing.nbytes
        return listed + self._stations.working_bytes

    def find(self, keys: torch.Tensor, agreement: Agreement, trains: bool = False) -> Route:
        """Collective. int64 [n] keys wanted by this rank, in any order, repeats allowed.

        Nothing is fetched here when a rank reports a fault, but the sizes still go round, so that every rank learns
        of it. The same where ranks make different calls: the route is then of no use.

        Args:
            trains: gradients will be pushed: replicated rows that are read are noted. Equal on all ranks.
        """
        touched = self._nothing_touched() if trains else None
        ids = self._by_group(keys)
        weights: list[torch.Tensor | None] = [None] * len(ids)
        route = Route([], [], [], agreement, [], touched)
        by_tier = []
        for station, hop in enumerate((*self.hops, None)):
            stops, missing = [], []
            for group, (of_group, weight) in enumerate(zip(ids, weights, strict=True)):
                stop, keys_of, counts = self._stations.stop(group, of_group, weight)
                by_tier.append(self._accesses(group, stop, counts))
                if station == 0:
                    ids[group] = keys_of
                if touched is not None:
                    touched.add(group, stop.entries)
                stops.append(stop)
                missing.append((keys_of, counts))
            route.stops.append(stops)
            route.requests.append(ids)
            if hop is None:
                _check_all_held(stops)
                break
            stops, sizes = self._stations.by_peer(hop, stops, [keys_of for keys_of, _ in missing])
            route.stops[-1] = stops
            if agreement.parted:
                sizes = torch.zeros_like(sizes)
            sent, received, agreement = hop.exchange_sizes(sizes, agreement)
            if agreement.parted:  # the ranks of the next hop are to hear of it too
                ids, weights, touched = [of_group[:0] for of_group in ids], [None] * len(ids), None
                continue
            packed = [
                keys_of.index_select(0, stop.asked) | (counts.index_select(0, stop.asked) << COUNT_SHIFT)
                for stop, (keys_of, counts) in zip(stops, missing, strict=True)
            ]
            note = None if touched is None else touched.up(station)
            arrived, words = hop.exchange_ids(
                _interleaved(packed, sent), sent, received, None if note is None or note.empty else note
            )
            if touched is not None and note is not None:
                touched.told_up(station, note.words if words is None else words)
            parts = _deinterleaved(arrived, received)
            ids, weights = [part & _KEY_MASK for part in parts], [part >> COUNT_SHIFT for part in parts]
            route.asked.append(sent)
            route.asked_of_me.append(received)
        home, node, device = torch.stack(by_tier).sum(dim=0).tolist()
        self.traffic.home_accesses += home
        self.traffic.node_accesses += node
        self.traffic.device_accesses += device
        return replace(route, agreement=agreement)

    def fetch(self, route: Route, *, expand: bool = True) -> list[torch.Tensor]:
        """Collective. Per group [requests of this rank, dim]; without ``expand`` [rows of the first station, dim]."""
        touched = route.touched if route.touched is not None and not route.touched.known_everywhere else None
        found: list[torch.Tensor] = []
        for station in range(len(route.stops) - 1, -1, -1):
            answers = None
            if station < len(self.hops):
                above = zip(found, route.stops[station + 1], self.wire, strict=True)
                asked, asked_of_me = route.asked[station], route.asked_of_me[station]
                columns = [
                    Column(rows, stop.expand, rows_of(g, asked_of_me), rows_of(g, asked), wire)
                    for g, (rows, stop, wire) in enumerate(above)
                ]
                note = None if touched is None else touched.down(station)
                if note is not None and not note.empty:
                    columns.append(_noted(note))
                answers = self.hops[station].exchange(columns)
                if touched is not None and note is not None:
                    told = note.words if note.empty else torch.cat(answers.pop()).view(-1)
                    touched.told_down(station, told)
            found = []
            for group, stop in enumerate(route.stops[station]):
                source = self._stores[group].rows
                if len(stop.held) == stop.rows:
                    found.append(source.index_select(0, stop.slots).to(self.wire[group]))
                    continue
                rows = source.new_empty((stop.rows, source.shape[1]), dtype=self.wire[group])
                rows.index_copy_(0, stop.held, source.index_select(0, stop.slots).to(rows.dtype))
                if answers is not None:
                    for part, at in zip(answers[group], split(stop.asked, route.asked[station], group), strict=True):
                        rows.index_copy_(0, at, part)
                found.append(rows)
        return [
            (rows if stop.expand is None or not expand else rows.index_select(0, stop.expand)).to(store.dtype)
            for rows, stop, store in zip(found, route.stops[0], self._stores, strict=True)
        ]

    def reduce(self, route: Route, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Per group [requests of this rank, dim] gradients -> [rows, dim], those of one row summed."""
        reduced = []
        for stop, grad, wide in zip(route.stops[0], grads, self.wide, strict=True):
            if stop.expand is None:
                reduced.append(grad.to(wide))
            else:
                total = grad.new_zeros((stop.rows, grad.shape[1]), dtype=wide)
                reduced.append(total.index_add_(0, stop.expand, grad.to(wide)))
        return reduced

    def push(
        self, route: Route, grads: Sequence[torch.Tensor], replicas: ReplicaSums | None = None
    ) -> list[list[tuple[GroupStop, torch.Tensor]]]:
        """Collective. Per group [rows at station 0, dim] gradients -> per group (stop, gradient of its held rows).

        Args:
            replicas: of the step: the gradients of the route's replicated rows are added to it, and travel along.
        """
        landed: list[list[tuple[GroupStop, torch.Tensor]]] = [[] for _ in self._stores]
        grads = [grad.to(wide) for grad, wide in zip(grads, self.wide, strict=True)]
        for station, stops in enumerate(route.stops):
            for group, stop in enumerate(stops):
                here = grads[group] if len(stop.held) == stop.rows else grads[group].index_select(0, stop.held)
                landed[group].append((stop, here))
                if replicas is not None:
                    replicas.land(group, stop.entries, here)
            if station == len(self.hops):
                break
            sent, received = route.asked[station], route.asked_of_me[station]
            columns = [
                Column(grad, stop.asked, rows_of(g, sent), rows_of(g, received), wire)
                for g, (grad, stop, wire) in enumerate(zip(grads, stops, self.wire, strict=True))
            ]
            if replicas is not None:
                columns += replicas.up(station)
            hop = self.hops[station]
            arrived = hop.exchange(columns)
            grads = [
                self._summed(parts, route.stops[station + 1][group], received, group, hop.peers.index)
                for group, parts in enumerate(arrived[: len(stops)])
            ]
            if replicas is not None:
                replicas.came_up(station, arrived[len(stops) :])
        return landed

    def _summed(
        self, parts: Sequence[torch.Tensor], stop: GroupStop, counts: Counts, group: int, me: int
    ) -> torch.Tensor:
        """Gradients by peer -> [rows, dim]. Those of this rank come first, as they do for a replicated row."""
        wide = self.wide[group]
        if stop.expand is None:
            return torch.cat([part.to(wide) for part in parts])
        total = parts[0].new_zeros((stop.rows, parts[0].shape[1]), dtype=wide)
        places = split(stop.expand, counts, group)
        for peer in (me, *(peer for peer in range(len(parts)) if peer != me)):
            if len(places[peer]):
                total.index_add_(0, places[peer], parts[peer].to(wide))
        return total

    def merged(self, passes: Sequence[tuple[Route, list[torch.Tensor]]]) -> tuple[Route, list[torch.Tensor]]:
        """``merge.merged``."""
        return merged(self._stations, self.hops, self.wide, passes)

    def touched(self, routes: Sequence[Route]) -> Touched | None:
        """Collective. The replicated rows that any rank has touched on any of its routes; None if there can be none.

        What was not told with ids and rows of the passes is told now.
        """
        if self._nothing_touched() is None:
            return None
        parts = [route.touched if route.touched is not None else self._tell_up(route) for route in routes]
        whole = Touched.together(parts)
        if not whole.known_everywhere:
            for number in reversed(range(len(self.hops))):
                whole.told_down(number, self._told(whole, number, whole.down(number)))
        return whole

    def sums(self, touched: Touched) -> ReplicaSums:
        """For the gradients of a step."""
        dims = [store.rows.shape[1] for store in self._stores]
        return ReplicaSums(touched, dims, self.wire, self.wide, [hop.all_reduces for hop in self.hops])

    def spread(self, replicas: ReplicaSums) -> None:
        """Collective. Gives every holder the sums."""
        replicas.spread(self.hops)

    def _tell_up(self, route: Route) -> Touched:
        touched = self._nothing_touched()
        if touched is None:
            raise AssertionError("no replicas")
        for station, stops in enumerate(route.stops):
            for group, stop in enumerate(stops):
                touched.add(group, stop.entries)
            if station < len(self.hops):
                touched.told_up(station, self._told(touched, station, touched.up(station)))
        return touched

    def _told(self, touched: Touched, hop: int, note: Note) -> torch.Tensor:
        """Collective over a hop, if any of its ranks has rows to tell of: ranks of other hops may list none at all."""
        if not touched.listing.exchanged[hop]:
            return note.words
        return self.hops[hop].exchange_note(note)

    def _nothing_touched(self) -> Touched | None:
        directories: list[object] = [store.directory for store in self._stores]
        if self._listing is None or any(a is not b for a, b in zip(directories, self._listed, strict=True)):
            self._listing = Listing.of(self._stores, self.hops, self._layout)
            self._listed = directories
        return Touched(self._listing, self._stores[0].rows.device) if any(self._listing.exchanged) else None

    def _by_group(self, keys: torch.Tensor) -> list[torch.Tensor]:
        if len(self._stores) == 1:
            return [keys]
        firsts = torch.tensor(self._firsts, dtype=torch.int64, device=keys.device)
        group = torch.searchsorted(firsts, keys, right=True) - 1
        return [keys[group == number] for number in range(len(self._stores))]

    def _accesses(self, group: int, stop: GroupStop, counts: torch.Tensor) -> torch.Tensor:
        """int64 [3] accesses answered here, by tier."""
        directory = self._stores[group].directory
        weight = counts if len(stop.held) == stop.rows else counts.index_select(0, stop.held)
        if len(directory) == 0:
            return torch.nn.functional.pad(weight.sum().view(1), (0, 2))
        tier = torch.where(stop.entries >= 0, directory.tiers_at(stop.entries.clamp(min=0)), 0)
        return torch.zeros(3, dtype=torch.int64, device=weight.device).scatter_add_(0, tier.to(torch.int64), weight)


def _check_all_held(stops: Sequence[GroupStop]) -> None:
    lost = sum(len(stop.asked) for stop in stops)
    if lost:
        raise EmbeddingError(f"{lost} rows were asked of a rank that is not their home")


def _interleaved(columns: Sequence[torch.Tensor], counts: Counts) -> torch.Tensor:
    """Per group [n] ordered by peer -> one tensor, peer after peer, in each group after group."""
    if len(columns) == 1:
        return columns[0]
    parts = [split(column, counts, group) for group, column in enumerate(columns)]
    return torch.cat(list(chain.from_iterable(zip(*parts, strict=True))))


def _deinterleaved(flat: torch.Tensor, counts: Counts) -> list[torch.Tensor]:
    """Inverse of ``_interleaved``."""
    groups = len(counts[0])
    if groups == 1:
        return [flat]
    pieces = torch.split(flat, list(chain.from_iterable(counts)))
    return [torch.cat(pieces[group::groups]) for group in range(groups)]


def _noted(note: Note) -> Column:
    return Column(note.words.view(-1, 1), None, note.sent, note.received, torch.int64, Kind.SYNC)
