"""Jobs beside the training thread: one at a time, by a thread of its own or at once by the caller."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from flexd.core.errors import EmbeddingError

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Job(Generic[Result]):
    work: Callable[[], Result]
    ready: torch.cuda.Event | None
    future: Future[Result]


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
        self._jobs: queue.SimpleQueue[_Job[Result] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._current: _Job[Result] | None = None
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
        self._current = job = _Job(work, ready, Future())
        if self._inline:
            self._do(job)
            error = job.future.exception()
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
        job = self._current
        assert job is not None  # noqa: S101
        if not wait([job.future], timeout_seconds).done:
            raise EmbeddingError(
                f"{self._name}: not done after {timeout_seconds:g} s",
                remedy="look for a rank that has stopped or runs other code; give init_process_group a longer timeout",
            )
        self._current = None
        if self._finished is not None:
            torch.cuda.current_stream(self._device).wait_event(self._finished)
        return job.future.result()

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
            self._do(job)
            del job

    def _do(self, job: _Job[Result]) -> None:
        try:
            result = self._on_stream(job)
        except BaseException as error:  # raised again by ``result``
            job.future.set_exception(error)
        else:
            job.future.set_result(result)

    def _on_stream(self, job: _Job[Result]) -> Result:
        with torch.no_grad():
            if self._stream is None:
                return job.work()
            with torch.cuda.stream(self._stream):
                if job.ready is not None:
                    self._stream.wait_event(job.ready)
                result = job.work()
                finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
                finished.record(self._stream)
                self._finished = finished
                return result
