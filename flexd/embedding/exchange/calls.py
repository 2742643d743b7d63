"""The calls of a step that exchange rows: timed by phase, one thread at a time, and no silent end on one rank only.

An error in the dense part of a model ends one rank only. The others find out when the connection to it closes, without
a cause, and on NCCL, or while a thread keeps the process alive, only at the timeout of the process group: so the end of
a process by an error is published too.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from flexd.core.errors import EmbeddingError
from flexd.core.step_phases import StepPhase

if TYPE_CHECKING:
    from flexd.control.protocol.report import PhaseReport
    from flexd.embedding.exchange.fault_notices import FaultNotices

_PHASES = tuple(StepPhase)
_NUMBER = {phase: number for number, phase in enumerate(_PHASES)}
_INTRA, _INTER = len(_PHASES), 2 * len(_PHASES)
_JOB, _COVER, _SKIPPED, _BUCKETS = (3 * len(_PHASES) + more for more in range(4))
"""Buckets of seconds: computed, in collectives inside the node, in others, each by phase; then waited for jobs,
computed beside jobs, not measured."""
# Counts of each phase: bytes and collectives by link.
_COUNTS = 4
# Laps of an accelerator that wait to be read before they are read without a report.
_MAX_LAPS = 512


class PhaseMeter:
    """Measures one thread, or on an accelerator the stream on which it queues its work.

    The time since the last lap goes to the phase in progress: computed before a collective, waited after it. A lap on
    a CPU reads a clock. On an accelerator it records an event, which is read when the device has passed it, so that
    the host never waits.

    Args:
        device: of the tensors.
        overlaps: of the meter of the prefetch pipeline: its collectives run beside those of the training thread.
    """

    def __init__(self, device: torch.device | None = None, *, overlaps: bool = False) -> None:
        self.overlaps = overlaps
        self.beside: PhaseMeter | None = None
        """The meter of the prefetch pipeline."""
        self._phase = _NUMBER[StepPhase.DENSE]
        self._covering = False
        self._seconds = [0.0] * _BUCKETS
        self._counts = [0] * (_COUNTS * len(_PHASES))
        self._drained: tuple[list[float], list[int]] = ([0.0] * _BUCKETS, [0] * (_COUNTS * len(_PHASES)))
        on_device = device is not None and device.type == "cuda" and torch.cuda.is_available()
        self._events: _Events | None = _Events(self._seconds) if on_device else None
        self._last = time.perf_counter()

    @contextmanager
    def phase(self, phase: StepPhase) -> Iterator[None]:
        """Measure what is inside as part of a phase; an inner phase counts for itself."""
        before = self._phase
        self._lap(before)
        self._phase = _NUMBER[phase]
        try:
            yield
        finally:
            self._lap(self._phase)
            self._phase = before

    def begin_collective(self) -> None:
        self._lap(self._phase)

    def end_collective(self, *, leaves_node: bool) -> None:
        """Count the time since ``begin_collective`` as waited for a collective."""
        self._lap((_INTER if leaves_node else _INTRA) + self._phase)
        self._counts[_COUNTS * self._phase + 2 + leaves_node] += 1

    def sent(self, intra_bytes: int, inter_bytes: int) -> None:
        """Add the sent bytes of a collective to the phase in progress."""
        at = _COUNTS * self._phase
        self._counts[at] += intra_bytes
        self._counts[at + 1] += inter_bytes

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave out bytes and collectives inside; their time is counted."""
        before = list(self._counts)
        try:
            yield
        finally:
            self._counts[:] = before

    def begin_job(self) -> None:
        """Count what is computed from now on as beside a job of the prefetch pipeline."""
        self._lap(self._phase)
        self._covering = True

    def begin_wait(self) -> None:
        """Begin to wait for the job."""
        self._lap(self._phase)
        self._covering = False

    def end_wait(self) -> None:
        """Count the time since ``begin_wait`` as waited for the job."""
        self._lap(_JOB)

    @property
    def in_progress(self) -> StepPhase:
        """The phase in progress."""
        return _PHASES[self._phase]

    def skip(self) -> None:
        """Do not count the time since ``begin_job``: the job ran in this thread, and its own meter has counted it."""
        self._covering = False
        self._lap(_SKIPPED)

    def waited_and_outside(self) -> tuple[float, float]:
        """Return the seconds so far that look-ups and gradients waited in collectives, and those outside flexd."""
        if self._events is not None:
            self._events.read()
        exchanged = [_NUMBER[phase] for phase in (StepPhase.IDS, StepPhase.ROWS, StepPhase.PUSH)]
        waited = sum(self._seconds[_INTRA + number] + self._seconds[_INTER + number] for number in exchanged)
        return waited, self._seconds[_NUMBER[StepPhase.DENSE]]

    def drain(self) -> tuple[tuple[PhaseReport, ...], float]:
        """Return what was measured since the last call, by phase, and the seconds that could cover the prefetch
        pipeline."""
        from flexd.control.protocol.report import PhaseReport  # for reports alone

        own, counts = self._since()
        ahead, ahead_counts = ([0.0] * _BUCKETS, [0] * len(counts)) if self.beside is None else self.beside._since()
        overlaps = self.beside is not None and self.beside.overlaps
        of_jobs = sum(ahead[_INTRA:_JOB])
        exposed = own[_JOB] / of_jobs if overlaps and of_jobs > 0 else 1.0
        both = [a + b for a, b in zip(own, ahead, strict=True)]
        numbers = [a + b for a, b in zip(counts, ahead_counts, strict=True)]
        reports = [
            PhaseReport(
                phase.value,
                own[computed] if overlaps else both[computed],
                own[intra] + own[inter] + (ahead[intra] + ahead[inter]) * exposed,
                both[intra],
                both[inter],
                ahead[intra] + ahead[inter] if overlaps else 0.0,
                *numbers[_COUNTS * computed : _COUNTS * (computed + 1)],
            )
            for phase, computed, intra, inter in zip(
                _PHASES, range(_INTRA), range(_INTRA, _INTER), range(_INTER, _JOB), strict=True
            )
        ]
        return tuple(reports), max(0.0, own[_COVER] - sum(ahead[:_INTRA])) if overlaps else 0.0

    def _lap(self, bucket: int) -> None:
        covers = self._covering and bucket < _INTRA
        if self._events is not None:
            self._events.lap(bucket, covers=covers)
            return
        now = time.perf_counter()
        self._seconds[bucket] += now - self._last
        if covers:
            self._seconds[_COVER] += now - self._last
        self._last = now

    def _since(self) -> tuple[list[float], list[int]]:
        if self._events is not None:
            self._events.read()
        seconds, counts = list(self._seconds), list(self._counts)
        before, counts_before = self._drained
        self._drained = seconds, counts
        return (
            [a - b for a, b in zip(seconds, before, strict=True)],
            [a - b for a, b in zip(counts, counts_before, strict=True)],
        )


class _Events:
    """Laps on a CUDA stream, read once the device has passed them."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = seconds
        self._laps: deque[tuple[torch.cuda.Event, int, bool]] = deque()
        self._free: list[torch.cuda.Event] = []
        self._last: torch.cuda.Event | None = None

    def lap(self, bucket: int, *, covers: bool) -> None:
        if len(self._laps) >= _MAX_LAPS:
            self.read()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._laps.append((event, bucket, covers))

    def read(self) -> None:
        while self._laps and self._laps[0][0].query():  # type: ignore[no-untyped-call]
            event, bucket, covers = self._laps.popleft()
            if self._last is not None:
                passed = self._last.elapsed_time(event) / 1e3
                self._seconds[bucket] += passed
                if covers:
                    self._seconds[_COVER] += passed
                self._free.append(self._last)
            self._last = event


Method = TypeVar("Method", bound=Callable[..., Any])


def in_phase(phase: StepPhase) -> Callable[[Method], Method]:
    """Measure a method of an object with a ``PhaseMeter`` named ``phases`` as part of a phase."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.phases.phase(phase):
                return method(self, *args, **kwargs)

        return measured  # type: ignore[return-value]

    return decorate


_c10d = torch._C._distributed_c10d
_STORE_OF_LAUNCHER = "TORCHELASTIC_USE_AGENT_STORE"
PUBLISH_SECONDS = 3.0
"""Limit of all notices of an ending process: the store may be gone already."""
HOST_SECONDS = 2.5
"""Time for which an ending process keeps the store that it hosts: two looks of a rank that waits."""


class StepGuard:
    """Refuses calls of a second thread, and publishes errors of the calls to ranks that wait for this one, and the end
    of the process by an error elsewhere.

    Args:
        passes: forward passes that wait for their step, at any time.
    """

    def __init__(self, rank: int, notices: FaultNotices, passes: Sequence[object]) -> None:
        self._rank = rank
        self._notices = notices
        self.passes = passes
        self._free = threading.Lock()
        self._inside: threading.Thread | None = None
        self.step_thread: threading.Thread | None = None
        """Thread of the newest step."""
        self.closed = False
        """No call is allowed any more."""
        if notices.live:
            PROCESS_END.watch(self)

    def leave(self) -> None:
        """Let the ranks know that the process ends."""
        self._notices.leave(self._rank, "has ended its process")

    def publish(self, error: BaseException) -> bool:
        """Let the ranks that wait for this one know why it cannot continue; False if the store cannot be reached."""
        return self._notices.publish(self._rank, error)

    @contextmanager
    def call(self, *, in_step: bool) -> Iterator[None]:
        """Run a call that exchanges rows; calls of the same thread may be nested.

        Args:
            in_step: a step is in progress, which other threads must not use.

        Raises:
            EmbeddingError: another thread is inside such a call, the step in progress is of another thread, or the
                collection is closed.
        """
        if self.closed:
            raise EmbeddingError(
                f"rank {self._rank}: the collection is closed", remedy="read and save its tables before close()"
            )
        me = threading.current_thread()
        if self._inside is me:
            yield
            return
        # Not a lock to wait for: in which order threads get it differs from rank to rank.
        if not self._free.acquire(blocking=False):
            raise self._second_thread(self._inside)
        try:
            if in_step and self.step_thread is not me:
                raise self._second_thread(self.step_thread)
            self._inside = me
            with self.publishing():
                yield
        finally:
            self._inside = None
            self._free.release()

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Publish an error: this rank ends a call in which others wait for it.

        Errors of the input are raised by every rank, and a job may continue after them. A notice would end a later
        wait.
        """
        try:
            yield
        except EmbeddingError:
            raise
        except Exception as error:
            self.publish(error)
            raise

    def _second_thread(self, other: threading.Thread | None) -> EmbeddingError:
        return EmbeddingError(
            f"rank {self._rank}: thread {threading.current_thread().name!r} uses the collection during a step of "
            f"thread {'another' if other is None else other.name!r}",
            remedy="use a collection from one thread: look-ups, steps and reading tables have one order on all ranks",
        )


class ProcessEnd:
    """Watches the process by ``sys.excepthook``, ``threading.excepthook`` and ``atexit``; hooks that were
    there run too.

    An error that the trainer catches, and ``os._exit``, are not seen.
    """

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[StepGuard] = weakref.WeakSet()
        self._installed = False
        self._told = False

    def watch(self, watched: StepGuard) -> None:
        """Tell of an end of the process until ``watched`` is closed or gone."""
        self._watched.add(watched)
        if self._installed:
            return
        self._installed = True
        before, before_thread = sys.excepthook, threading.excepthook

        def of_process(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            before(kind, error, trace)
            self._tell(error, lambda _: True)

        def of_thread(given: threading.ExceptHookArgs) -> None:
            before_thread(given)
            error = given.exc_value
            if error is not None:
                self._tell(error, lambda watched: watched.step_thread is given.thread)

        sys.excepthook, threading.excepthook = of_process, of_thread
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if not self._told:
            self._tell(RuntimeError("the process ended during a step"), lambda watched: bool(watched.passes))
        if not self._told and os.environ.get(_STORE_OF_LAUNCHER) == "True":  # others' store may have ended
            deadline = time.monotonic() + PUBLISH_SECONDS
            for watched in list(self._watched):
                if not watched.closed and time.monotonic() < deadline:
                    watched.leave()

    def _tell(self, error: BaseException, concerns: Callable[[StepGuard], bool]) -> None:
        deadline = time.monotonic() + PUBLISH_SECONDS
        for watched in list(self._watched):
            if not watched.closed and concerns(watched) and time.monotonic() < deadline:
                self._told |= watched.publish(error)
        if self._told and _hosts_store():
            time.sleep(HOST_SECONDS)


def _hosts_store() -> bool:
    """Return whether the store of the process group ends with this process, as far as is known."""
    try:
        store = dist.distributed_c10d._get_default_store()
        while isinstance(store, _c10d.PrefixStore):
            store = store.underlying_store
        of_launcher = os.environ.get(_STORE_OF_LAUNCHER) == "True"
        return isinstance(store, _c10d.TCPStore) and dist.get_rank() == 0 and not of_launcher
    except (RuntimeError, ValueError):
        return False  # the process group is gone


PROCESS_END = ProcessEnd()
