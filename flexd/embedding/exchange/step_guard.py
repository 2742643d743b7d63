"""Guards the calls of a step that exchange rows: one thread at a time, and no silent end on one rank only.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
import torch.distributed as dist

from flexd.core.errors import EmbeddingError
from flexd.embedding.exchange.fault_notice import FaultNotices

_c10d = torch._C._distributed_c10d
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
        of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return isinstance(store, _c10d.TCPStore) and dist.get_rank() == 0 and not of_launcher
    except (RuntimeError, ValueError):
        return False  # the process group is gone


PROCESS_END = ProcessEnd()
