"""One job of the prefetch pipeline: push deferred gradients, then locate and fetch the next batch; and its thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from flexd.core.errors import EmbeddingError
from flexd.core.step_phases import StepPhase
from flexd.embedding import devices
from flexd.embedding.engine import RowEngine
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.exchange.hop import LOOKS_AHEAD, NO_FLAGS, Agreement, CallSignature, NextBatch, uneven_loop
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.exchange.route import FeatureKeys, Route
from flexd.embedding.exchange.router import Router
from flexd.embedding.prefetch.announced_input import AnnouncedInput, LoaderEnd
from flexd.embedding.prefetch.route_split import Marks, RouteSplit, exchange_marks, split_route
from flexd.embedding.replicas.replica_sync import ReplicaSync, RowGradients
from flexd.embedding.replicas.touched_rows import TouchedRows
from flexd.embedding.step import ForwardPass
from flexd.embedding.store.store import GroupStore

if TYPE_CHECKING:
    from flexd.embedding.ids.unbounded_ids import Resolution

logger = logging.getLogger(__name__)

_MAX_RANKS = 2**20


def exchange_home_slots(stores: Sequence[GroupStore], world: Peers, found: FeatureKeys) -> list[torch.Tensor]:
    """Collective. Return of each dim-group int64 [n] ascending slots of this rank's home rows that any rank's batch
    looks up.

    Args:
        world: all ranks.
        found: the keys of this rank's batch.
    """
    mine: list[list[torch.Tensor]] = []
    for store, keys in zip(stores, found.keys.split_with_sizes(found.numbers), strict=True):
        distinct = keys.unique()  # type: ignore[no-untyped-call]
        order, counts = devices.ordered(distinct % world.size, world.size)
        slots = torch.div(distinct - store.group.first_key, world.size, rounding_mode="floor").index_select(0, order)
        mine.append(list(slots.split_with_sizes(counts.tolist())))
    # Peer by peer, in each dim-group by dim-group.
    sent = torch.tensor([[len(slots) for slots in of_group] for of_group in mine], device=found.keys.device).T
    each = [len(mine)] * world.size
    received = world.all_to_all(sent.reshape(-1), each, each).view(-1, len(mine)).tolist()
    message = torch.cat([of_group[peer] for peer in range(world.size) for of_group in mine]).to(torch.int32)
    arrived = world.all_to_all(message, sent.sum(dim=1).tolist(), [sum(of_peer) for of_peer in received])
    parts = arrived.split_with_sizes([number for of_peer in received for number in of_peer])
    return [
        torch.cat(parts[group :: len(mine)]).to(torch.int64).unique()  # type: ignore[no-untyped-call]
        for group in range(len(mine))
    ]


@dataclass(frozen=True)
class PrefetchPipelineResult:
    """Result of a job.

    Attributes:
        passes: the passes that were open.
        order: features of the next batch, see ``FeatureKeys.order``.
        forward_pass: pass of the next batch; None if it is not looked up ahead.
        uneven: the error of a rank that has a batch where another has none; None if all have one, or none has.
        rows: per group [rows of the route's first station, dim], without those of ``split.marked``; None: fetch all.
        split: of the route; None: nothing is missing in ``rows``.
        pass_splits: of ``passes`` (marked: read by the next batch); empty if no step was expected in between.
        touched: replicated rows that each of ``passes``, and then the next batch, touches on any rank; None: none.
    """

    passes: tuple[ForwardPass, ...]
    order: list[str] = field(default_factory=list)
    forward_pass: ForwardPass | None = None
    uneven: EmbeddingError | None = None
    rows: list[torch.Tensor] | None = None
    split: RouteSplit | None = None
    pass_splits: tuple[RouteSplit, ...] = ()
    touched: tuple[TouchedRows | None, ...] = ()


class DeferredGradients:
    """Splits the gradients of one step into those pushed in it and those, of rows that the next batch does not read,
    deferred to the next job.

    Args:
        splits: of the step's passes.
        touched, deferred: replicated rows with gradients of either kind on any rank.
    """

    def __init__(self, splits: Sequence[RouteSplit], touched: TouchedRows | None, deferred: TouchedRows | None) -> None:
        self.touched = touched
        self._splits = splits
        self._deferred = deferred
        self._parts: list[tuple[Route, list[torch.Tensor]]] = []
        self.update: Callable[[list[RowGradients]], None] | None = None
        """Updates rows by the deferred gradients."""

    def split(self, number: int, grads: Sequence[torch.Tensor]) -> tuple[Route, list[torch.Tensor]]:
        """Keep the deferred part of the gradients of a pass, and return the part to push now with its route.

        Args:
            grads: per group [rows of the first station, dim].
        """
        now, later = self._splits[number].split_rows(grads)
        self._parts.append((self._splits[number].rest, later))
        return self._splits[number].marked, now

    def push(self, sync: ReplicaSync) -> None:
        """Collective. Push the deferred gradients, and update their rows."""
        summed = sync.push(self._parts, self._deferred)
        if self.update is not None:
            self.update(summed)


class PrefetchPipelineJob:
    """Runs in a separate thread, on separate process groups.

    Args:
        router, sync: of the engine's stores, over those process groups.
        groups: these groups.
    """

    def __init__(self, engine: RowEngine, router: Router, sync: ReplicaSync, groups: ChainGroups) -> None:
        self._engine, self._groups = engine, groups
        self._stores = engine.stores
        self._router, self._sync = router, sync
        self._rank = engine.groups.rank
        self._device = engine.stores[0].rows.device
        no_keys = torch.empty(0, dtype=torch.int64, device=self._device)
        self._no_keys = FeatureKeys([], no_keys, None, [0] * len(self._stores))
        self.input_changed = False
        """True if any rank's ``changed`` was true in the last job, as soon as the ranks have agreed."""
        self.world: Peers | None = None
        """All ranks, if batches farther ahead are announced to the homes; set on all ranks or on none."""
        self.resolution_before: Resolution | None = None
        """Of unbounded ids of the batch in hand, for the next job to apply."""
        self.next_batch: NextBatch | None = None
        """Of a loop that ranks may end at different batches."""
        self._slot_marks = [
            torch.zeros(len(store.rows), dtype=torch.bool, device=self._device) for store in self._stores
        ]
        self.working = self._slot_marks, self._router, self._sync
        """Objects whose tensors stay between jobs."""

    def run(
        self,
        batch: AnnouncedInput | LoaderEnd,
        deferred: DeferredGradients | None,
        passes: tuple[ForwardPass, ...],
        *,
        step_expected: bool,
        locate: bool,
        fetch: bool,
        settings_digest: int,
        farther: Sequence[AnnouncedInput | LoaderEnd],
        passes_kept: int,
        changed: torch.Tensor | None,
        trains: bool = True,
    ) -> PrefetchPipelineResult:
        """Collective.

        Args:
            deferred: gradients of the step before; pushed first.
            passes: passes that the step under way will push.
            step_expected: whether these are all of its passes.
            locate: whether to look the batch up. Equal on all ranks.
            fetch: whether to fetch its rows; not if the step changes all rows. Equal on all ranks.
            settings_digest: of the optimizer settings of the last update.
            farther: batches to announce to the homes, this one among the first of a loop; equally many on all ranks.
            passes_kept: batches before this one whose rows an update still needs.
            changed: bool [] on the device: the last input is not the one that was located ahead for it.
            trains: the batch will be looked up for training.
        """
        if deferred is not None:
            deferred.push(self._sync)
        error: Exception | None = None
        found = self._no_keys
        if isinstance(batch, AnnouncedInput) and locate:
            try:
                found = batch.keys
            except Exception as fault:  # a rank that stops alone would leave the others waiting
                error = fault
        touched = self._sync.new_touched()
        own, resolution = self._agreement(batch, error, settings_digest), None
        if self._engine.ids is not None:
            from flexd.embedding.ids.unbounded_ids import BatchAhead  # loaded where a job has unbounded ids

            ahead = BatchAhead(self.resolution_before, changed, int(step_expected and len(passes) > 0))
            with self._router.phases.phase(StepPhase.IDS):
                resolution = self._engine.ids.resolve(found, own, self._groups.world, trains=trains, ahead=ahead)
            found, self.resolution_before = resolution.found, None
        route = self._router.find(found, own, touched, changed)
        forward_pass = ForwardPass(route, touched, self._engine.trained, resolution)
        agreement = route.agreement
        self.input_changed = agreement.changed
        if self.next_batch is not None:
            self.next_batch.agreed = agreement.flags
        self._engine.inbox.end_exchange(max(agreement.version, 0))
        self._engine.arm.agreed(agreement.arm)
        result = PrefetchPipelineResult(passes, found.order)
        if agreement.version < 0:
            failed, rank = divmod(-1 - agreement.version, _MAX_RANKS)
            if agreement.fault < 0 and not failed:
                return result
            return replace(result, uneven=uneven_loop(rank, loader_failed=failed > 0))
        if self.world is not None and farther and not agreement.diverged:
            self._announce(self.world, farther, passes_kept)
        if not locate:
            return result
        result = replace(result, forward_pass=forward_pass)
        if agreement.fault or agreement.diverged or not fetch:
            return result
        if not step_expected or not passes:
            return replace(result, rows=self._router.fetch(route, touched, expand=False))
        return self._fetch_unchanged(result, forward_pass)

    def _announce(self, world: Peers, farther: Sequence[AnnouncedInput | LoaderEnd], passes_kept: int) -> None:
        """Collective. Tell the homes which rows batches farther ahead look up."""
        with self._router.phases.phase(StepPhase.IDS):
            for batch in farther:
                found = self._no_keys
                if isinstance(batch, AnnouncedInput):
                    try:
                        found = batch.keys
                    except Exception:  # its own look-up raises it
                        logger.debug("rank %d: a batch ahead cannot be resolved", self._rank, exc_info=True)
                for store, slots in zip(self._stores, exchange_home_slots(self._stores, world, found), strict=True):
                    if store.tier is not None:
                        store.tier.expect(slots)
        for store in self._stores:
            if store.tier is not None:
                store.tier.begin_batch(passes_kept)

    def _agreement(self, batch: AnnouncedInput | LoaderEnd, error: Exception | None, settings_digest: int) -> Agreement:
        """Return the agreement of this rank.

        A rank without a batch sends a version below all others' and a fault below none: so every rank detects whether
        any loader has ended, which one, and whether all have.
        """
        version, fault = self._engine.inbox.begin_exchange(), 0 if error is None else 1 + self._rank
        if isinstance(batch, LoaderEnd):
            version, fault = -1 - self._rank - (0 if batch.error is None else _MAX_RANKS), -1
        call = CallSignature.of(self._rank, steps=0, passes=LOOKS_AHEAD, flag=True)
        flags = NO_FLAGS if self.next_batch is None else self.next_batch.mine
        return Agreement(version, fault, call, call, (settings_digest,) * 2, self._engine.arm.proposed, flags)

    def _fetch_unchanged(self, result: PrefetchPipelineResult, forward_pass: ForwardPass) -> PrefetchPipelineResult:
        """Collective. Fetch the rows that the passes of the step under way do not change."""
        passes, route = result.passes, forward_pass.route
        touched = tuple(self._sync.agree([(one.pushed, one.touched)]) for one in (*passes, forward_pass))
        before = [(one.pushed, of_pass) for one, of_pass in zip(passes, touched, strict=False)]
        after = [(route, touched[-1])]
        with self._router.phases.phase(StepPhase.IDS):
            marks = exchange_marks(
                self._router.hops,
                [route, *(one.pushed for one in passes)],
                [self._shared(route, before), *(self._shared(one.pushed, after) for one in passes)],
            )
            split = split_route(route, marks[0])
        rows = []
        for first, at, part in zip(route.stations[0], split.rest_rows, self._router.fetch(split.rest), strict=True):
            rows.append(part.new_empty((first.rows, part.shape[1])).index_copy_(0, at, part))
        pass_splits = tuple(split_route(one.pushed, of_pass) for one, of_pass in zip(passes, marks[1:], strict=True))
        return replace(
            result, forward_pass=forward_pass, rows=rows, split=split, pass_splits=pass_splits, touched=touched
        )

    def _shared(self, route: Route, others: Sequence[tuple[Route, TouchedRows | None]]) -> Marks:
        """Mark the rows that this rank holds for ``route`` and that ``others`` touch on any rank."""
        stations = range(len(route.stations))
        flags: Marks = [[] for _ in stations]
        for group, (store, marks) in enumerate(zip(self._stores, self._slot_marks, strict=True)):
            # All requests for a row without replicas arrive here; for the others ranks have agreed on touched rows.
            slots = torch.cat(
                [at_station[group].slots for other, _ in others for at_station in other.stations]
                + [
                    store.directory.slots_at(touched.entries_of_group(group))
                    for _, touched in others
                    if touched is not None
                ]
            )
            marks.index_fill_(0, slots, True)
            for station in stations:
                flags[station].append(marks.index_select(0, route.stations[station][group].slots))
            marks.index_fill_(0, slots, False)
        return flags


Result = TypeVar("Result")


class WorkerThread(Generic[Result]):
    """Runs jobs: ``submit`` starts one, ``result`` waits for it; at most one is under way.

    On CUDA a job runs on a stream of its own, after the work queued on the submitter's current stream; work queued
    after ``result`` comes after the job. The thread starts with the first job. It is a daemon thread: a collective that
    never returns must not keep the process.

    Args:
        inline: ``submit`` runs the job in the calling thread, and no thread is started. The host then waits only for
            what the job reads on the host; the rest of it is queued on its stream.
    """

    def __init__(self, name: str, device: torch.device, *, inline: bool = False) -> None:
        self._name = name
        self._inline = inline
        self._device = device
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._current: Future[Result] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._finished: torch.cuda.Event | None = None

    @property
    def busy(self) -> bool:
        """True from ``submit`` until ``result`` has returned or raised the job's result."""
        return self._current is not None

    def submit(self, work: Callable[[], Result]) -> None:
        """Start a job. Raises EmbeddingError if one is under way."""
        if self._current is not None:
            raise EmbeddingError(f"{self._name}: a job is under way", remedy="wait for its result first")
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(self._device))
        future: Future[Result] = Future()
        self._current = future
        job = partial(self._run_job, work, ready, future)
        if self._inline:
            job()
            error = future.exception()
            if not isinstance(error, Exception | None):
                raise error  # an interrupt is the caller's
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def result(self, timeout_seconds: float) -> Result:
        """Wait for the job under way; raise the exception that ended it, if any.

        Raises:
            EmbeddingError: it did not end within the deadline. It stays under way.
        """
        future = self._current
        assert future is not None  # noqa: S101
        if not wait([future], timeout_seconds).done:
            raise EmbeddingError(
                f"{self._name}: not done after {timeout_seconds:g} s",
                remedy="look for a rank that has stopped or runs other code; give init_process_group a longer timeout",
            )
        self._current = None
        if self._finished is not None:
            torch.cuda.current_stream(self._device).wait_event(self._finished)
        return future.result()

    def stop(self, timeout_seconds: float) -> bool:
        """End the thread after the job under way. Returns whether it ended within the deadline."""
        if self._thread is None:
            return True
        self._jobs.put(None)
        self._thread.join(timeout_seconds)
        ended = not self._thread.is_alive()
        self._thread = None
        return ended

    def _run(self) -> None:
        jobs = self._jobs
        while (job := jobs.get()) is not None:
            job()
            del job

    def _run_job(self, work: Callable[[], Result], ready: torch.cuda.Event | None, future: Future[Result]) -> None:
        try:
            future.set_result(self._on_stream(work, ready))
        except BaseException as error:  # raised again by ``result``
            future.set_exception(error)

    def _on_stream(self, work: Callable[[], Result], ready: torch.cuda.Event | None) -> Result:
        with torch.no_grad():
            if self._stream is None:
                return work()
            with torch.cuda.stream(self._stream):
                if ready is not None:
                    self._stream.wait_event(ready)
                result = work()
                finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
                finished.record(self._stream)
                self._finished = finished
                return result
