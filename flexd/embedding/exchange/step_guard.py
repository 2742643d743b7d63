"""Guards the calls of a step that exchange rows: one thread at a time, and no silent end on one rank only."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flexd.core.errors import EmbeddingError
from flexd.embedding.exchange.fault_notice import FaultNotices
from flexd.embedding.exchange.process_end import PROCESS_END


class StepGuard:
    """Refuses calls of a second thread, and publishes errors of the calls to ranks that wait for this one, and the end
    of the process by an error elsewhere.

    Args:
        passes: forward passes that wait for their step, at any time.
    """

    def __init__(self, rank: int, notices: FaultNotices, passes: Sequence[object]) -> None:
        self._rank = rank
        self._notices = notices
        self._passes = passes
        self._free = threading.Lock()
        self._inside: threading.Thread | None = None
        self._step_thread: threading.Thread | None = None
        self.closed = False
        """No call is allowed any more."""
        if notices.live:
            PROCESS_END.watch(self)

    @property
    def used_by(self) -> threading.Thread | None:
        """Thread of the newest step."""
        return self._step_thread

    @property
    def in_step(self) -> bool:
        """A forward pass waits for its step."""
        return bool(self._passes)

    def publish(self, error: BaseException) -> bool:
        """Let the ranks that wait for this one know why it cannot continue; False if the store cannot be reached."""
        return self._notices.publish(self._rank, error)

    def begin_step(self) -> None:
        """Let the step in progress belong to this thread."""
        self._step_thread = threading.current_thread()

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
            if in_step and self._step_thread is not me:
                raise self._second_thread(self._step_thread)
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
            self._notices.publish(self._rank, error)
            raise

    def _second_thread(self, other: threading.Thread | None) -> EmbeddingError:
        return EmbeddingError(
            f"rank {self._rank}: thread {threading.current_thread().name!r} uses the collection during a step of "
            f"thread {'another' if other is None else other.name!r}",
            remedy="use a collection from one thread: look-ups, steps and reading tables have one order on all ranks",
        )
