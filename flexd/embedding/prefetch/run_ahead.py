"""Run-ahead: what of batch t+1 can be done while step t computes, and what of step t can be left for step t+1.

While the training thread computes batch t, a second thread, on process groups of its own, does one job::

    1. push the gradients that step t-1 left behind, and update their rows
    2. find the route of batch t+1, and which replicated rows it reads on any rank
    3. tell, one bit a row, which rows of batch t+1 step t changes (the holder of a row has seen all requests of
       both batches), and which rows of step t batch t+1 reads
    4. fetch the rows of batch t+1 that step t does not change

``optimizer.step`` then pushes the gradients of rows that batch t+1 reads and leaves the others to the next job; the
forward pass of batch t+1 fetches the rows that the step has changed. For replicated rows the same holds of their
synchronisation. So every row is read after the last update before
its batch, and updated once a step with the whole sum of its gradients: losses and tables are as without run-ahead.

The training thread waits for the job before any collective of its own on rows, and every decision is made from what
all ranks know alike, so ranks cannot part. The life of one batch::

    announce -> start -> (job) -> take -> fetch          by forward passes
                          |-> left_of -> leave           by ``optimizer.step``: what is left goes with the next start

What breaks the assumptions of a job (a pass that it has not seen, a step where none was expected, rows loaded from a
checkpoint) only makes its rows, or all of it, be fetched anew. Chunks are applied between two jobs: where one is due
the next batch is not looked up ahead.

Memory: one batch of ids, its route, and its rows beyond what a step needs, the gradients of one step, and one byte for
each row slot of the stores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace

import torch

from flexd.control.agent.inbox import ChunkInbox
from flexd.core.errors import EmbeddingError
from flexd.embedding.exchange.route import Router
from flexd.embedding.exchange.sent_bytes import Traffic
from flexd.embedding.exchange.station import Route
from flexd.embedding.jagged import Jagged
from flexd.embedding.prefetch.background import Background
from flexd.embedding.prefetch.job import Ahead, AheadJob, Left, Upcoming
from flexd.embedding.replicas.replica_sync import Touched
from flexd.embedding.replicas.row_updates import ReplicaSync, Summed


class RunAhead:
    """Everything here is called by the training thread, at the same points on every rank.

    Args:
        job: on process groups that nobody else uses.
        traffic: of those; it moves to ``trainer_traffic`` when a job is over, and is added up in ``overlapped``.
    """

    def __init__(
        self,
        job: AheadJob,
        inbox: ChunkInbox,
        traffic: Traffic,
        trainer_traffic: Traffic,
        *,
        rank: int,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        self.overlapped = Traffic()
        """Bytes and accesses of the jobs, which no step waited for unless it was shorter."""
        self.passes_per_step = 1
        self._job = job
        self._inbox = inbox
        self._traffic = traffic
        self._trainer_traffic = trainer_traffic
        self._rank = rank
        self._device = device
        self.timeout_seconds = timeout_seconds
        self._thread: Background[Ahead] = Background(f"flexd-ahead-{rank}", device)
        self._announced: Upcoming | None = None
        self._started: Upcoming | None = None
        self._ahead: Ahead | None = None
        self._left: Left | None = None
        self._looping = False
        self._entered = False
        self._failure: BaseException | None = None

    # What ``prefetch`` calls.

    def begin(self) -> None:
        """A loop begins. Raises EmbeddingError if another has not ended."""
        if self._looping:
            raise EmbeddingError(
                "another loop over prefetched batches of this collection has not ended",
                remedy="leave it first, or close() its iterator",
            )
        self._looping = True

    def announce(self, upcoming: Upcoming) -> None:
        """The batch after the one whose forward pass comes next; that forward pass starts its job."""
        self._announced = upcoming

    def start_announced(self, open_routes: Sequence[Route] = (), *, idle: bool = False) -> None:
        """Collective. Starts the job of the announced batch if no forward pass has.

        Args:
            open_routes: of the passes that the next step will push.
            idle: look nothing up: more than these routes' rows may change before the batch.
        """
        self._check_failure()
        if self._announced is None:
            return
        self.join()
        self._ahead = None
        upcoming, self._announced = self._announced, None
        self._started = upcoming
        left, self._left = self._left, None
        due = idle or self._inbox.agreed_version > self._inbox.applied_version
        stepping = len(open_routes) % self.passes_per_step == 0
        passes = tuple(open_routes)
        self._thread.submit(lambda: self._job.run(upcoming, left, passes, stepping=stepping, due=due))

    def finish(self) -> None:
        """The loop is over on this rank. Raises EmbeddingError if it is not on all others."""
        self.join()
        ahead, self._ahead, self._started, self._announced = self._ahead, None, None, None
        if ahead is not None and ahead.uneven >= 0:
            raise _uneven(ahead.uneven)

    def close(self) -> bool:
        """Forgets the upcoming batch and ends the thread. What a step has left stays, for the next use of the rows.

        Returns:
            Did the thread end within the deadline?
        """
        try:
            self.join()
        except Exception as error:  # of a job that no step will ask for
            self._failure = self._failure or error
        self._ahead = self._started = self._announced = None
        self._looping = False
        return self._thread.stop(self.timeout_seconds)

    @property
    def thread_alive(self) -> bool:
        return self._thread.alive

    # What the engine calls.

    @property
    def held(self) -> object:
        """Whose tensors stay until the next job."""
        return self._ahead, self._left

    @property
    def working_bytes(self) -> int:
        """Allocated once."""
        return self._job.working_bytes

    @property
    def holds_route(self) -> bool:
        """Was a route found that is yet to be used? No chunk may be applied then."""
        return self._thread.under_way or (self._ahead is not None and self._ahead.route is not None)

    def join(self) -> None:
        """Waits for the job under way.

        Raises:
            EmbeddingError: the job did not end within the deadline, or one before had failed.
            Exception: what the job failed with.
        """
        self._check_failure()
        if not self._thread.under_way:
            return
        try:
            self._ahead = self._thread.result(self.timeout_seconds)
        except BaseException as error:
            self._failure = error
            raise
        for name, value in self._traffic.totals().items():
            setattr(self.overlapped, name, getattr(self.overlapped, name) + value)
        self._traffic.move_to(self._trainer_traffic)
        if self._device.type == "cuda":
            _keep_for(torch.cuda.current_stream(self._device), self._ahead)

    def settle(self, sync: ReplicaSync) -> None:
        """Collective. After it the rows are as if nothing had been left behind.

        Args:
            sync: of the training thread.
        """
        self.join()
        left, self._left = self._left, None
        if left is not None:
            left.push(sync)

    def drop(self, sync: ReplicaSync) -> None:
        """Collective. ``settle``, and nothing that was found or fetched ahead is used."""
        self.settle(sync)
        self._ahead = None

    def take(self, given: object, *, usable: bool) -> Ahead | None:
        """Collective. Of the input of a forward pass: what was found ahead, or None if it must be looked up now.

        Args:
            usable: False if it must be in any case.

        Raises:
            EmbeddingError: this rank has a batch that another has not.
        """
        # The loop has the batch only once the one after it is announced: before, what is given is something else, even
        # if nothing tells it from the batch (without any feature on this rank).
        started = self._started if self._announced is not None else None
        self._entered = started is not None and _same(given, started.given)
        if not self._entered:
            return None
        self.join()
        self._started = None
        ahead = self._ahead
        if ahead is not None and ahead.uneven >= 0:
            self._ahead = None
            raise _uneven(ahead.uneven)
        if ahead is None or ahead.route is None or not usable:
            self._ahead = None
            return None
        if ahead.route.agreement.fault:
            self._ahead = None
        return ahead

    def fetch(self, route: Route, router: Router, *, expand: bool) -> list[torch.Tensor]:
        """Collective. As ``Router.fetch``; rows that were fetched ahead do not travel again."""
        ahead = self._ahead
        if ahead is None or ahead.route is not route:
            return router.fetch(route, expand=expand)
        self._ahead = None
        if ahead.rows is None:
            return router.fetch(route, expand=expand)
        if ahead.cut is not None:
            late = router.fetch(ahead.cut.marked, expand=False)
            for found, at, part in zip(ahead.rows, ahead.cut.marked_rows, late, strict=True):
                found.index_copy_(0, at, part)
        return [
            rows.index_select(0, stop.expand) if expand and stop.expand is not None else rows
            for rows, stop in zip(ahead.rows, route.stops[0], strict=True)
        ]

    def fetched(self, open_routes: Sequence[Route], *, idle: bool) -> None:
        """Collective. A forward pass has its rows: if it was that of the trainer's batch, the next job starts, as by
        ``start_announced``."""
        if self._entered:
            self._entered = False
            self.start_announced(open_routes, idle=idle)

    def left_of(self, routes: Sequence[Route], *, leave: bool) -> Left | None:
        """Collective. Before the gradients of these passes are pushed: what divides them, or None to push everything.

        Args:
            leave: may anything be left? Not if all gradients are needed at once (clipping by norm).
        """
        self.join()
        ahead = self._ahead
        if ahead is None or ahead.route is None:
            return None
        seen = len(routes) == len(ahead.passes) and all(a is b for a, b in zip(routes, ahead.passes, strict=True))
        if seen and ahead.cuts:
            self._ahead = replace(ahead, cuts=())
            if not leave:
                return None
            *passes, upcoming = ahead.touched
            ours = [touched for touched in passes if touched is not None]
            if upcoming is None or not ours:
                return Left(ahead.cuts, None, None)
            return Left(ahead.cuts, *Touched.together(ours).divide(upcoming))
        # The step changes rows that the job did not expect it to.
        self._ahead = replace(ahead, rows=None, cut=None, cuts=())
        return None

    def leave(self, left: Left, update: Callable[[list[Summed]], None]) -> None:
        """After a step: the next job, or ``settle``, pushes what it left and calls ``update`` with the sums."""
        left.update_by(update)
        self._left = left

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise EmbeddingError(
                f"rank {self._rank}: an exchange ahead has failed before: {self._failure}",
                remedy="start again from the last checkpoint",
            ) from self._failure


def _uneven(rank: int) -> EmbeddingError:
    return EmbeddingError(
        f"rank {rank} has no further batch, other ranks have",
        remedy="give all ranks equally many batches: drop the last ones (drop_last) or pad with empty ones",
    )


def _same(given: object, announced: object) -> bool:
    """Is this the announced input? A mapping made anew counts if it holds the same objects or ids."""
    if given is announced:
        return True
    if not isinstance(given, Mapping) or not isinstance(announced, Mapping) or given.keys() != announced.keys():
        return False
    return all(
        value is announced[name]
        or (
            isinstance(value, Jagged) and isinstance(announced[name], Jagged) and value.values is announced[name].values
        )
        for name, value in given.items()
    )


def _keep_for(stream: torch.cuda.Stream, value: object) -> None:
    """Memory of tensors that another stream made is not used again before what is queued on this one is done."""
    if isinstance(value, torch.Tensor):
        value.record_stream(stream)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _keep_for(stream, part)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            _keep_for(stream, getattr(value, part.name))
