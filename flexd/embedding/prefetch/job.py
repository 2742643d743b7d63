"""One job of a run-ahead: what it is given, what it finds out about the next batch, and what a step leaves to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexd.control.agent.inbox import ChunkInbox
from flexd.embedding.exchange.hop import Agreement, Call
from flexd.embedding.exchange.route import Router
from flexd.embedding.exchange.station import Route
from flexd.embedding.prefetch.route_split import Cut, Marks, carry_marks, cut
from flexd.embedding.replicas.replica_sync import Touched
from flexd.embedding.replicas.row_updates import ReplicaSync, Summed
from flexd.embedding.store.store import GroupStore


@dataclass(frozen=True)
class Upcoming:
    """The batch after the one that the trainer has.

    Attributes:
        given: what its forward pass will be called with. None: there is no such batch on this rank.
        resolve: gives (anything that the forward pass needs, int64 [n] keys); raises what its input deserves.
    """

    given: object
    resolve: Callable[[], tuple[Any, torch.Tensor]] | None


@dataclass(frozen=True)
class Ahead:
    """What a job found out about the upcoming batch.

    Attributes:
        input: first part of ``Upcoming.resolve``'s answer; None if it raised ``error``.
        route: None if the batch is not looked up ahead.
        uneven: a rank that has no further batch while another has; -1 if there is none.
        rows: per group [rows of the route's first station, dim], filled in except for ``cut.marked``; None: fetch all.
        cut: of the route; None: nothing is missing in ``rows``.
        passes: routes of the passes that were open.
        cuts: of those (marked: read by the batch); none if no step was expected in between.
        touched: replicated rows that each of ``passes``, and then ``route``, touches on any rank; None: there are none.
    """

    input: Any
    error: Exception | None
    route: Route | None
    uneven: int
    rows: list[torch.Tensor] | None
    cut: Cut | None
    passes: tuple[Route, ...]
    cuts: tuple[Cut, ...]
    touched: tuple[Touched | None, ...]


class Left:
    """The gradients of one step that it pushes, and those that it leaves, of rows that the next batch does not read.

    Args:
        cuts: of the step's passes.
        pushed, later: replicated rows with gradients of either kind on any rank.
    """

    def __init__(self, cuts: Sequence[Cut], pushed: Touched | None, later: Touched | None) -> None:
        self.pushed = pushed
        self._cuts = cuts
        self._later = later
        self._parts: list[tuple[Route, list[torch.Tensor]]] = []
        self._update: Callable[[list[Summed]], None] | None = None

    def divide(self, number: int, grads: Sequence[torch.Tensor]) -> tuple[Route, list[torch.Tensor]]:
        """Of one pass: per group [rows of the first station, dim] -> what to push now, and along which route."""
        now, later = self._cuts[number].divide(grads)
        self._parts.append((self._cuts[number].rest, later))
        return self._cuts[number].marked, now

    def update_by(self, update: Callable[[list[Summed]], None]) -> None:
        self._update = update

    def push(self, sync: ReplicaSync) -> None:
        """Collective. Pushes what was left, and updates the rows."""
        summed = sync.push(self._parts, self._later)
        if self._update is not None:
            self._update(summed)


class AheadJob:
    """Works in a thread of its own, on process groups of its own.

    Args:
        router, sync: over those process groups.
        rank: this one.
    """

    def __init__(
        self, stores: Sequence[GroupStore], router: Router, sync: ReplicaSync, inbox: ChunkInbox, rank: int
    ) -> None:
        self._stores = list(stores)
        self._router = router
        self._sync = sync
        self._inbox = inbox
        self._rank = rank
        self._device = stores[0].rows.device
        self._slot_marks = [torch.zeros(len(store.rows), dtype=torch.bool, device=self._device) for store in stores]

    @property
    def working_bytes(self) -> int:
        """Allocated once."""
        marks = sum(marks.nbytes for marks in self._slot_marks)
        return marks + self._router.working_bytes + self._sync.working_bytes

    def run(
        self,
        upcoming: Upcoming,
        left: Left | None,
        passes: tuple[Route, ...],
        *,
        stepping: bool,
        due: bool,
    ) -> Ahead:
        """Collective.

        Args:
            left: of the step before; pushed first.
            passes: routes of the passes that the step under way will push.
            stepping: are these all of its passes?
            due: look nothing up.
        """
        if left is not None:
            left.push(self._sync)
        received, uninvolved = None, upcoming.given is None or due
        error: Exception | None = None
        keys = torch.empty(0, dtype=torch.int64, device=self._device)
        if not uninvolved:
            assert upcoming.resolve is not None  # noqa: S101
            try:
                received, keys = upcoming.resolve()
            except Exception as fault:  # whatever it is: a rank that leaves alone lets the others wait
                error = fault
        version = self._inbox.begin_exchange()
        # A rank without a batch says a version below all others' and a fault below none: so every rank learns
        # whether any has ended, which one, and whether all have.
        call = Call.of(self._rank, trains=True, passes=0, steps=0)
        mine = (
            Agreement(-1 - self._rank, -1, call, call)
            if upcoming.given is None
            else Agreement(version, 0 if error is None else 1 + self._rank, call, call)
        )
        route = self._router.find(keys, mine, True)
        agreement = route.agreement
        self._inbox.end_exchange(max(agreement.version, 0))
        nothing = Ahead(received, error, None, -1, None, None, passes, (), ())
        if agreement.version < 0:
            return nothing if agreement.fault < 0 else replace(nothing, uneven=-1 - agreement.version)
        if due:
            return nothing
        found = replace(nothing, route=route)
        if agreement.fault:
            return found
        if not stepping or not passes:
            return replace(found, rows=self._router.fetch(route, expand=False))
        touched = tuple(self._router.touched([one]) for one in (*passes, route))
        before, after = list(zip(passes, touched, strict=False)), [(route, touched[-1])]
        marks = carry_marks(
            self._router.hops,
            [route, *passes],
            [self._shared(route, before), *(self._shared(of_pass, after) for of_pass in passes)],
        )
        halves = cut(route, marks[0])
        rows = []
        for stop, store, at, part in zip(
            route.stops[0], self._stores, halves.rest_rows, self._router.fetch(halves.rest), strict=True
        ):
            rows.append(part.new_empty((stop.rows, store.rows.shape[1])).index_copy_(0, at, part))
        cuts = tuple(cut(of_pass, of_marks) for of_pass, of_marks in zip(passes, marks[1:], strict=True))
        return replace(found, rows=rows, cut=halves, cuts=cuts, touched=touched)

    def _shared(self, route: Route, others: Sequence[tuple[Route, Touched | None]]) -> Marks:
        """Which rows that this rank holds for ``route`` are touched by ``others``, on any rank."""
        stations = range(len(route.stops))
        flags: Marks = [[] for _ in stations]
        for group, (store, marks) in enumerate(zip(self._stores, self._slot_marks, strict=True)):
            # All requests for a row without replicas arrive here; of others the ranks have told each other.
            slots = torch.cat(
                [stops[group].slots for other, _ in others for stops in other.stops]
                + [store.directory.slots_at(touched.positions(group)) for _, touched in others if touched is not None]
            )
            marks.index_fill_(0, slots, True)
            for station in stations:
                flags[station].append(marks.index_select(0, route.stops[station][group].slots))
            marks.index_fill_(0, slots, False)
        return flags
