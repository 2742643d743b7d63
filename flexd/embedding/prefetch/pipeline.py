"""Prefetch pipeline: exchange rows of batch t+1, and deferred gradients of step t-1, while step t computes.

While step t computes batch t, one job runs::

    1. push the gradients that step t-1 deferred, and update their rows
    2. find the route of batch t+1, and agree which replicated rows it reads on any rank
    3. send back, one bit per row, which rows of batch t+1 step t changes (the holder of a row has received all requests
       of both batches), and which rows of step t batch t+1 reads
    4. fetch the rows of batch t+1 that step t does not change

``optimizer.step`` then pushes the gradients of rows that batch t+1 reads and defers the others to the next job; the
forward pass of batch t+1 fetches the rows that the step has changed. The synchronisation of replicated rows is split in
the same way. So every row is read after the last update before its batch, and updated once a step with the whole sum of
its gradients: losses and tables are those of training without the prefetch pipeline.

The job runs in a second thread, on process groups of its own, or, with ``one_thread``, in the training thread: as the
forward pass of batch t ends, on the process groups of the step. Collectives of several threads have no common order
over ranks, which NCCL needs, so an accelerator always uses the second mode. Its job is queued on a stream of its own.

The training thread waits for the job before any collective of its own on rows, and every decision depends only on what
all ranks have, so ranks cannot diverge. ``PrefetchPipeline`` joins the steps; the events of one batch::

    announce -> start -> (job) -> claim -> fetch_ahead              by forward passes
                          |-> split_gradients -> updated   by ``optimizer.step``; deferred: to the next start

A pass after the start of the job, an unexpected step, or rows loaded from a checkpoint only cause the rows to
be fetched again. Inputs are announced by value (``AnnouncedInput``). A forward pass compares on the device; the ranks
learn in the sizes of the next job, or with two threads beside the rows that they fetch late, whether any rank's input
is another one: then all of them locate and fetch that batch again.

Where the tuner may choose (``flexd.embedding.tuning``), ranks agree with every look-up whether the next batch is
located ahead. If it is not there is no job: the pipeline pushes what it has deferred, and the batch is looked up by its
forward pass. The rank whose loader ends then meets the look-up of the others (``agree_on_end``).

Chunks are applied between two jobs: where one is due the next batch is not looked up by the job.
With an optimizer that moves all rows a job does 2 alone.

Memory: one batch of ids, its route, and its rows beyond what a step needs, the gradients of one step, and one byte for
each row slot of the stores.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from flexd.core.errors import EmbeddingError
from flexd.core.usage_warnings import USAGE_WARNINGS, UsageWarningKind
from flexd.embedding import devices
from flexd.embedding.engine import RowEngine
from flexd.embedding.exchange.arms import PREFETCHES
from flexd.embedding.exchange.calls import PhaseMeter
from flexd.embedding.exchange.collectives import Peers, Traffic
from flexd.embedding.exchange.hop import SETTLES, AgreementFlags, NextBatch
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.meetings import agree_on_loop, agree_on_next
from flexd.embedding.pending_passes import agree_on_sending
from flexd.embedding.prefetch.announced_input import AnnouncedInput, ChangeNotice, LoaderEnd, may_be_input
from flexd.embedding.prefetch.pipeline_job import (
    DeferredGradients,
    PrefetchPipelineJob,
    PrefetchPipelineResult,
    WorkerThread,
)
from flexd.embedding.rank_rows import RankRows
from flexd.embedding.replicas.touched_rows import TouchedRows
from flexd.embedding.row_optimizers import RowUpdate
from flexd.embedding.step import ForwardPass, RoutedInput, StepMoments
from flexd.embedding.store.memory import iterate_tensors

if TYPE_CHECKING:
    from flexd.embedding.ids.unbounded_ids import Resolution

logger = logging.getLogger(__name__)

_Announced = AnnouncedInput | LoaderEnd


class PrefetchPipeline(StepMoments):
    """Runs the jobs of an engine. Called by the training thread, at the same points on every rank.

    Collective: without ``one_thread`` it takes process groups that no other thread uses, and makes them the first
    time. The traffic of a job moves to the engine's when it is over, and is added up in ``overlapped`` unless the host
    waits for it: no step waits for that traffic unless the step is shorter than the job.

    Args:
        one_thread: the training thread issues the collectives of the jobs; equal on all ranks.
    """

    fetches_early = True

    def __init__(self, engine: RowEngine, *, one_thread: bool) -> None:
        self.overlapped = Traffic()
        """The part of the traffic that no step waited for."""
        self.passes_per_step = self.batches_ahead = 1
        self.fetches_rows = True
        self.one_thread = one_thread
        self._engine = engine
        self._rank = engine.groups.rank
        self._device = engine.stores[0].rows.device
        self._traffic = Traffic()
        self._overlaps = not one_thread or self._device.type != "cpu"
        self._traffic.phases = engine.phases.beside = PhaseMeter(self._device, overlaps=self._overlaps)
        self._groups = groups = ChainGroups(
            engine.groups.layout, self._traffic, self._device, engine.groups.notices, own=not one_thread
        )
        self._timeout_seconds = groups.timeout_seconds
        router, sync = engine.new_exchange(groups, self._traffic)
        self.exchanges = ((groups, router),)
        self._job = PrefetchPipelineJob(engine, router, sync, groups)
        self.working = self._job.working
        self._thread: WorkerThread[PrefetchPipelineResult] = WorkerThread(
            f"flexd-ahead-{self._rank}", self._device, inline=one_thread
        )
        self._announced: _Announced | None = None
        self._farther: Sequence[_Announced] = ()
        # All that were announced and not given to a job.
        self._known: Sequence[_Announced] = ()
        # True if the last job announced batches farther ahead: the homes know all but the last one.
        self._homes_know = False
        self._started: _Announced | None = None
        self.in_hand: _Announced | None = None
        """The batch that the trainer has; the loop sets it. It may be looked up more than once."""
        self._result: PrefetchPipelineResult | None = None
        self._splitting: DeferredGradients | None = None
        self.deferred: DeferredGradients | None = None
        self._looping = False
        # True if ranks agree step by step whether to locate the next batch ahead; otherwise they always do.
        self._chosen = False
        # True if the newest announced batch has a job. Equal on all ranks.
        self._on = True
        self._claimed = False
        self._claimed_input: AnnouncedInput | None = None
        # True if the claimed input is another one than the announced; None: it cannot be.
        self._changed: torch.Tensor | None = None
        self._changed_anywhere = self._overwritten = False
        self._resolution: Resolution | None = None
        """Of the input that was claimed, until it is known whether it was that of every rank."""
        self._announced_with_grad = False
        self._trained_otherwise = self._warned = False
        self._failure: BaseException | None = None

    @staticmethod
    def _of(engine: RowEngine) -> PrefetchPipeline | None:
        return next((each for each in engine.joined if isinstance(each, PrefetchPipeline)), None)

    @staticmethod
    def is_looping(engine: RowEngine) -> bool:
        """Return whether a loop has begun and not ended. Equal on all ranks."""
        found = PrefetchPipeline._of(engine)
        return found is not None and found._looping

    @staticmethod
    def begin(
        engine: RowEngine,
        passes_per_step: int,
        one_thread: bool | None = None,
        ahead: int | None = None,
        uneven: str = "error",
    ) -> PrefetchPipeline:
        """Collective. Begin a loop that announces its batches, ``ahead`` batches before they are trained on.

        Args:
            ahead: None: the tuner decides; ``batches_ahead`` is the largest of its choices.
            uneven: as in ``flexd.prefetch``.

        Raises:
            EmbeddingError: a second thread is asked for on an accelerator; on every rank: ranks begin loops with
                different settings, or a rank begins none.
        """
        on_host = devices.in_host_memory(engine.stores[0].rows)
        if one_thread is False and not on_host:
            raise EmbeddingError(
                "prefetch: one_thread=False for tables that are not in host memory",
                remedy="leave it out: collectives of two threads have no common order over ranks, and may deadlock",
            )
        one_thread = not on_host if one_thread is None else one_thread
        found = PrefetchPipeline._of(engine)
        agree_on_loop(
            engine,
            f"one_thread={one_thread}, passes_per_step={passes_per_step}, ahead={ahead}, uneven={uneven!r}",
        )
        if found is None or found.one_thread != one_thread:
            engine.settle()
            if found is not None:
                found.ended()
                engine.joined.remove(found)
            with torch.inference_mode(mode=False):  # a loop for evaluation may be the first one
                found = PrefetchPipeline(engine, one_thread=one_thread)
            engine.joined.insert(0, found)  # the others see a step whose gradients are deferred
        found._looping = True
        found._chosen = ahead is None
        found.passes_per_step = passes_per_step
        found._job.world = None if ahead == 1 else found._world_of_slow_rows()
        choices = (1,) if ahead else PREFETCHES if found._job.world else PREFETCHES[:2]
        found.batches_ahead = ahead or choices[-1]
        found._let_choose(choices)
        return found

    def _let_choose(self, prefetch: tuple[int, ...]) -> None:
        tuner = self._engine.tuner()
        if tuner is not None:
            tuner.prefetch = prefetch

    def _world_of_slow_rows(self) -> Peers | None:
        """Collective. Return all ranks, whose homes are told of batches farther ahead; None if all rows are fast."""
        stores = self._engine.stores
        in_two = torch.tensor([int(any(store.tier is not None for store in stores))], device=self._device)
        with self._engine.router.traffic.uncounted():
            anywhere = self._engine.groups.world.all_gather(in_two)
        return self._groups.world if bool(anywhere.any()) else None

    # Called by the loop.

    def expect(self, mine: AgreementFlags) -> None:
        """Set whether this rank has the batch that is announced next, for the next agreement."""
        if self._job.next_batch is None:
            self._job.next_batch = NextBatch(mine)
            self._engine.loops.append(self._job.next_batch)
        self._job.next_batch.set(mine)

    def agree_on_next(self) -> AgreementFlags:
        """Return what all ranks have of the announced batch. Collective if neither its job nor a look-up has told it.

        Raises:
            Exception: the error of the job.
        """
        self.wait()
        assert self._job.next_batch is not None  # noqa: S101
        return agree_on_next(self._engine, self._job.next_batch)

    def announce(self, batch: _Announced, farther: Sequence[_Announced] = ()) -> None:
        """Set the batch after that of the next forward pass; that forward pass starts its job.

        Args:
            farther: all batches that are known, this one first; equally many on all ranks.
        """
        self._known = (batch, *farther)
        self._announced, self._farther = batch, farther[-1:] if self._homes_know else farther
        self._announced_with_grad = torch.is_grad_enabled()

    def start_announced(self, changed: torch.Tensor | None = None) -> None:
        """Collective. Start the job of the announced batch unless a forward pass has.

        Args:
            changed: as in ``PrefetchPipelineJob.run``.
        """
        self._check_failure()
        if self._announced is None:
            return
        self.wait()
        if isinstance(self._started, AnnouncedInput) and self._trained_otherwise and self._on:
            self._count_unused()
        self._trained_otherwise = False
        self._result = None
        batch, self._announced = self._announced, None
        farther, self._farther = self._farther, ()
        self._started = batch
        before, arm = self._engine.arm.prefetches, self._engine.arm
        arm.prefetches = arm.next.prefetch if self._chosen else 1
        # In one thread, the job tells the other ranks whether the input of the batch before has changed.
        self._on = arm.prefetches > 0 or (before > 0 and self.one_thread)
        # The homes know all batches ahead or none.
        self._homes_know = self._job.world is not None and (not self._chosen or arm.prefetches > 1)
        if not self._on:
            self.settle()
        if not self._homes_know:
            self._forget_batches()
            farther = ()
        if not self._on:
            return
        self._engine.prefetched_batches += isinstance(batch, AnnouncedInput)
        deferred, self.deferred = self.deferred, None
        inbox, passes = self._engine.inbox, tuple(self._engine.passes)
        # Chunks are applied, the exchange is changed and copies of loaded rows are refreshed before the next look-up.
        # Gradients that wait belong to rows of earlier passes.
        locate = inbox.agreed_version <= inbox.applied_version and self._engine.summed is None
        locate = locate and arm.prefetches > 0 and not arm.due and not self._engine.stale_replicas
        step_expected = len(passes) % self.passes_per_step == 0
        digest = self._engine.settings_digest

        def job() -> PrefetchPipelineResult:
            with self._engine.guard.publishing(), torch.inference_mode(mode=False), torch.no_grad():
                return self._job.run(
                    batch, deferred, passes,
                    step_expected=step_expected, locate=locate, fetch=self.fetches_rows, settings_digest=digest,
                    farther=farther, passes_kept=self.passes_per_step, changed=changed,
                    trains=self._announced_with_grad,
                )  # fmt: skip

        self._engine.phases.begin_job()
        self._thread.submit(job)
        if not self._overlaps:
            self._engine.phases.skip()

    def finish(self, end: LoaderEnd) -> None:
        """End the loop on this rank. Raises EmbeddingError if it does not end on all others, and what the loader
        raised."""
        if not self._on:
            end.agree(self._engine)
        if end.error is not None:
            raise end.error
        self.wait()
        result, self._result, self._started, self._announced = self._result, None, None, None
        if result is not None and result.uneven is not None:
            raise result.uneven

    def close(self) -> bool:
        """Drop the next batch and end the thread. Deferred gradients stay for the next use of the rows.

        Returns:
            Whether the thread ended within the deadline.
        """
        try:
            self.wait()
        except Exception as error:  # of a job whose result no step will use
            self._failure = self._failure or error
        self._result = self._started = self._announced = self.in_hand = None
        self._farther = self._known = ()
        self._looping, self._engine.arm.prefetches = False, 0
        self._job.next_batch = None
        self._engine.loops.clear()
        self._let_choose((0,))
        self._forget_batches()
        return self._thread.stop(self._timeout_seconds)

    def _forget_batches(self) -> None:
        self._homes_know = False
        for store in self._engine.stores:
            if store.tier is not None:
                store.tier.forget_batches()

    def ended(self) -> bool:
        ended = self.close()
        if ended:
            self._groups.close()
        return ended

    # Called by the engine: ``StepMoments``.

    @property
    def held(self) -> object:  # type: ignore[override]
        return self._result, self.deferred

    @property
    def holds_route(self) -> bool:  # type: ignore[override]
        return self._thread.busy or (self._result is not None and self._result.forward_pass is not None)

    def wait(self) -> None:
        """Wait for the job under way.

        Raises:
            EmbeddingError: the job did not end within the deadline, or an earlier one failed.
            Exception: the error of the job.
        """
        self._check_failure()
        if not self._thread.busy:
            return
        self._engine.phases.begin_wait()
        try:
            self._result = self._thread.result(self._timeout_seconds)
        except BaseException as error:
            self._failure = error
            raise
        self._engine.phases.end_wait()
        if self._overlaps:
            self.overlapped.add(self._traffic)
        self._engine.router.traffic.add(self._traffic)
        self._traffic.reset()
        if self._device.type == "cuda":
            for tensor in iterate_tensors(self._result):  # their memory stays until the training stream has used it
                tensor.record_stream(torch.cuda.current_stream(self._device))

    def settle(self) -> None:
        self.wait()
        deferred, self.deferred = self.deferred, None
        if deferred is not None:
            agree_on_sending(self._engine, SETTLES)
            deferred.push(self._engine.sync)

    def discard(self) -> None:
        self.settle()
        self._result = None

    def regrouped(self, before: RankRows, after: RankRows) -> bool:
        """Make the job of the stores as they are now; batches that are known are located anew."""
        del before, after
        engine, world, next_batch = self._engine, self._job.world, self._job.next_batch
        router, sync = engine.new_exchange(self._groups, self._traffic)
        self.exchanges = ((self._groups, router),)
        self._job = PrefetchPipelineJob(engine, router, sync, self._groups)
        self._job.world, self._job.next_batch = world, next_batch
        self.working = self._job.working
        self._forget_batches()
        self._farther = ()
        for batch in (self._started, *self._known):
            if isinstance(batch, AnnouncedInput):
                batch.forget_keys()
        return True

    def claim(self, given: object, *, usable: bool, trains: bool) -> RoutedInput | None:
        """Return the located input of a forward pass, or None if it must be looked up now.

        Raises:
            EmbeddingError: this rank has a batch that another has not.
        """
        # The loop yields a batch only after announcing the next one. Before that ``given`` is another input, even if
        # it equals the batch (without any feature on this rank).
        started = self._started if self._announced is not None else None
        announced = started if isinstance(started, AnnouncedInput) else None
        self._changed, self._changed_anywhere = None, False
        self._overwritten, self._resolution = False, None
        # Evaluation in a training loop, with inputs of the same features, is not for the announced batch.
        by_value = torch.is_grad_enabled() == self._announced_with_grad
        self._claimed = announced is not None and may_be_input(given, announced.given, by_value=by_value)
        if announced is None or not self._claimed:
            self._trained_otherwise |= started is not None and torch.is_grad_enabled()
            return None
        self.wait()
        self._started = None
        self._overwritten = not self._on and announced.overwritten
        result = self._result
        if result is not None and result.uneven is not None:
            self._result = None
            raise result.uneven
        if result is None or result.forward_pass is None or not usable:
            self._result = None
            return None
        agreement = result.forward_pass.route.agreement
        if agreement.fault and not agreement.diverged and not agreement.settings_differ:
            self._result = None  # what was announced cannot be looked up; what is given now may be
            self._count_unused(here=agreement.fault == self._rank + 1 and announced.differs(given))
            return None
        self._resolution, ids = result.forward_pass.resolution, self._engine.ids
        if ids is not None and self._resolution is not None and not ids.is_current(self._resolution, trains=trains):
            self._result = self._resolution = None  # a look-up in between has changed who has rows
            return None
        values, differs = announced.compare(given)
        if differs is not False:
            self._changed = torch.as_tensor(differs, device=self._device)
        self._claimed_input = announced
        return RoutedInput(values.features, result.order, result.forward_pass, given, self._changed_input)

    def _changed_input(self) -> Callable[[], None] | None:
        announced, self._claimed_input = self._claimed_input, None
        if not self._changed_anywhere:
            return None
        here = announced if self._changed is not None and bool(self._changed) else None
        self._count_unused(here=here is not None)

        def check() -> None:
            if here is not None and here.overwritten:
                raise self._overwritten_error()

        return check

    def check_given(self, given: object) -> None:
        in_hand = self.in_hand
        if self._overwritten or (isinstance(in_hand, AnnouncedInput) and in_hand.is_lost_in(given)):
            raise self._overwritten_error()

    def _overwritten_error(self) -> EmbeddingError:
        return EmbeddingError(
            f"rank {self._rank}: the loader has written a later batch to the memory of this one",
            remedy="let it make new tensors for each batch; flexd.prefetch reads batches ahead, so that one buffer "
            "cannot hold them",
        )

    def fetch_ahead(self, forward_pass: ForwardPass, *, expand: bool) -> list[torch.Tensor] | None:
        result = self._result
        if result is None or result.forward_pass is not forward_pass:
            return None
        self._result = None
        router, notice = self._engine.router, self._notice()
        if result.rows is None:
            if notice is None:
                return None
            found = router.fetch(forward_pass.route, forward_pass.touched, expand=expand, chunk=notice)
        else:
            if result.split is not None:
                late = router.fetch(result.split.marked, expand=False, chunk=notice)
                for rows, at, part in zip(result.rows, result.split.marked_rows, late, strict=True):
                    rows.index_copy_(0, at, part)
            elif notice is not None:
                notice.exchange(router.hops)
            found = [
                rows.index_select(0, first.expand) if expand and first.expand is not None else rows
                for rows, first in zip(result.rows, forward_pass.route.stations[0], strict=True)
            ]
        self._changed_anywhere = notice is not None and notice.changed
        return found

    def _notice(self) -> ChangeNotice | None:
        """Return what tells the other ranks of a changed input; None if the next job does, which waits anyway."""
        if self.one_thread:
            return None
        same = torch.zeros((), dtype=torch.bool, device=self._device)
        return ChangeNotice(same if self._changed is None else self._changed)

    def fetched(self) -> None:
        if not self._claimed:
            return
        self._claimed = self._job.input_changed = False
        resolution, self._resolution = self._resolution, None
        if self.one_thread:
            self._job.resolution_before = resolution
        elif resolution is not None and not self._changed_anywhere:
            ids = self._engine.ids
            assert ids is not None  # noqa: S101
            ids.apply(resolution)
        self.start_announced(self._changed if self.one_thread else None)
        if self.one_thread:
            self._changed_anywhere = self._job.input_changed

    def split_gradients(self, *, defer: bool) -> DeferredGradients | None:
        self._splitting = None
        self.wait()
        result, passes = self._result, self._engine.passes
        if result is None or result.forward_pass is None:
            return None
        known = len(passes) == len(result.passes) and all(a is b for a, b in zip(passes, result.passes, strict=True))
        if not known or not result.pass_splits:
            # The step changes rows that the job did not expect.
            self._result = replace(result, rows=None, split=None, pass_splits=())
            return None
        self._result = replace(result, pass_splits=())
        if not defer:
            return None
        *of_passes, of_next = result.touched
        touched = [of_pass for of_pass in of_passes if of_pass is not None]
        if of_next is None or not touched:
            self._splitting = DeferredGradients(result.pass_splits, None, None)
        else:
            self._splitting = DeferredGradients(result.pass_splits, *TouchedRows.union(touched).split(of_next))
        return self._splitting

    def updated(self, optimizer: RowUpdate, step: int) -> None:
        if self._splitting is not None:
            self._splitting.update = partial(self._engine.sync.update, optimizer=optimizer, step=step)
            self.deferred, self._splitting = self._splitting, None

    def _count_unused(self, *, here: bool = True) -> None:
        """Count a batch that was looked up with another input than announced; note and warn ``here``, once."""
        self._engine.unused_batches += 1
        if not here:
            return
        USAGE_WARNINGS.note(
            UsageWarningKind.CHANGED_IDS, "ids were changed or moved after features= of flexd.prefetch returned them"
        )
        if not self._warned:
            self._warned = True
            logger.warning(
                "rank %d: the rows of a prefetched batch were located twice: the forward pass got other ids or "
                "lengths than features= of flexd.prefetch returned; mask or move them in the loader, not in the loop",
                self._rank,
            )

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise EmbeddingError(
                f"rank {self._rank}: an exchange ahead has failed before: {self._failure}",
                remedy="start again from the last checkpoint",
            ) from self._failure
