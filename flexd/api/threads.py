"""The daemon's threads: faults, and what fails at present."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from flexd.api.base import Model
from flexd.api.families import counters, gauges

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from flexd.core.supervision import Supervisor


class ThreadProblem(Model):
    """Work of a thread that fails at present; it is attempted again after a back-off."""

    thread: str
    """Name of the thread."""
    work: str = ""
    """The part of its work; empty if the thread does one thing."""
    error: str = ""
    """Type and text of the newest exception."""
    faults: int = 0
    """Exceptions since its last progress."""


class ThreadsStatus(Model):
    """Unexpected exceptions of the daemon's threads; counters run since the process started."""

    faults: dict[str, int] = Field(default_factory=dict)
    """Exceptions by thread."""
    problems: tuple[ThreadProblem, ...] = ()
    """The work that fails now."""
    ending: str | None = None
    """Reason why the daemon is ending because it cannot go on safely; null otherwise."""

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of the threads."""
        yield counters("flexd_thread_faults", "Unexpected exceptions, by thread.", "thread", self.faults)
        failing = {problem.thread for problem in self.problems}
        yield gauges(
            "flexd_thread_failing", "1 while the work of the thread fails, which makes the daemon not ready.", "thread",
            {name: float(name in failing) for name in self.faults},
        )  # fmt: skip


def threads_status(supervisor: Supervisor) -> ThreadsStatus:
    """Return the state of a supervisor's threads."""
    return ThreadsStatus(
        faults=supervisor.faults(),
        problems=tuple(ThreadProblem.from_object(problem) for problem in supervisor.problems()),
        ending=supervisor.fatal or None,
    )
