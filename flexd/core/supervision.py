"""One rule for every thread of the daemon: an exception is counted, logged, backed off from and shown, never lost.

An unexpected exception of a thread's work

- is counted by the thread's name, and logged with its stack the first time and at every power of two after that;
- delays the next attempt by a time that doubles up to ``MAX_BACKOFF_SECONDS`` and starts over after progress;
- is the thread's *problem* until the work has made progress, which makes the daemon not ready.

Work that cannot be repeated, because what it changed may be half changed, raises ``UnsafeStateError``: the daemon then
stops all parts in order and exits with ``EXIT_UNSAFE_STATE``. docs/threads.md lists the rule of each thread.

Log lines have an event's name and its fields, as ``key=value`` text and as data for the JSON format.

Faults are tried out at *fault points*, at which a test kills or stops the process, or raises an exception. They have no
effect in a process that was not armed: ``FLEXD_FAULT_POINT=name:count:action[,name:count:action]`` arms ``flexd run``.
When the process passes point ``name`` for the ``count``-th time it sends itself a signal, ``kill`` (SIGKILL) or
``stop`` (SIGSTOP, until it receives SIGCONT), or it raises ``InjectedFaultError`` there (``raise``). Each entry acts
once. ``first-last`` in place of ``count`` stands for every passage from the one to the other.
"""

import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from flexd.core.errors import ConfigError, FlexdError

VARIABLE = "FLEXD_FAULT_POINT"

# In the order in which a daemon first passes them, except for snapshots. Those from ``reset.saved`` on are passed by
# ``flexd state reset``.
POINTS = (
    "hello.accepted", "epoch.begin", "epoch.announced", "epoch.settled", "epoch.go", "epoch.joined", "epoch.live",
    "epoch.end", "epoch.ended", "migration.started", "journal.begin", "journal.renamed", "journal.begun",
    "journal.append", "journal.appended", "chunk.announce", "chunk.announced", "chunk.half_sent", "chunk.sent",
    "chunk.agreed", "chunk.applied", "migration.finished", "snapshot.begin", "snapshot.copied", "snapshot.written",
    "snapshot.renamed", "snapshot.committed",
    "reset.saved", "reset.moved",
)  # fmt: skip
# The points that the daemon of a training job passes again and again.
POINTS_OF_A_JOB = POINTS[: POINTS.index("reset.saved")]

# One in the work of every thread of the daemon, for ``raise``.
THREAD_POINTS = (
    "thread.loop", "thread.planning", "thread.coordinator", "thread.channel", "thread.ingest", "thread.counting",
    "thread.drift", "thread.http",
)  # fmt: skip

_ACTIONS: Mapping[str, signal.Signals | None] = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "raise": None}


class InjectedFaultError(Exception):
    """Raised by a fault point that was armed with ``raise``."""


# Signal, or None to raise, by point and number of the passage (from 1).
_armed: dict[str, dict[int, signal.Signals | None]] = {}
_passed: dict[str, int] = {}


def fault_point(name: str) -> None:
    """Record that the process passes point ``name``."""
    if not _armed:
        return
    passage = _passed[name] = _passed.get(name, 0) + 1
    actions = _armed.get(name, {})
    if passage not in actions:
        return
    signal_to_send = actions.pop(passage)
    if signal_to_send is None:
        raise InjectedFaultError(f"{name} was armed to raise")
    os.kill(os.getpid(), signal_to_send)


def arm(environ: Mapping[str, str] = os.environ) -> None:
    """Arm this process according to the environment; without the variable disarm it.

    Raises:
        ConfigError: the variable cannot be read, or names an unknown point or action.
    """
    _armed.clear()
    _passed.clear()
    for entry in filter(None, environ.get(VARIABLE, "").split(",")):
        name, _, rest = entry.partition(":")
        count, _, action = rest.partition(":")
        first, _, last = count.partition("-")
        last = last or first
        passages = range(int(first), int(last) + 1) if first.isdecimal() and last.isdecimal() else range(0)
        known = name in POINTS or name in THREAD_POINTS
        if not known or action not in _ACTIONS or not 0 < len(passages) <= 10_000 or passages[0] < 1:
            _armed.clear()
            raise ConfigError(
                f"{VARIABLE}: {entry!r} is not a fault point",
                remedy="unset it, or give name:count:action (kill, stop, raise) with a point of core/supervision.py",
            )
        _armed.setdefault(name, {}).update(dict.fromkeys(passages, _ACTIONS[action]))


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-+:/,@%")


def log_event(logger: logging.Logger, level: int, event: str, fields: Mapping[str, object]) -> None:
    """Log ``event key=value ...``. The record carries ``event`` and ``fields`` for formatters that keep structure."""
    if logger.isEnabledFor(level):
        text = " ".join([event, *format_fields(fields)])
        logger.log(level, "%s", text, extra={"event": event, "fields": dict(fields)}, stacklevel=2)


def format_fields(fields: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yield one ``key=value`` a field. Nested mappings are flattened to ``outer.inner=value``, lists are JSON, and text
    with spaces, quotes, equal signs or line breaks is quoted as JSON."""
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield from format_fields(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={_format_value(value)}"


def _format_value(value: object) -> str:
    if isinstance(value, str):
        return value if value and _PLAIN.issuperset(value) else json.dumps(value)
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else list(value)
        return json.dumps(items, separators=(",", ":"), default=str)
    return _format_value(str(value))


def is_power_of_two(count: int) -> bool:
    """Tell whether to log the ``count``-th time of the same event: at powers of two, the log stays bounded."""
    return count & (count - 1) == 0


class _TextLines(logging.Formatter):
    """Format a record as text whose message is one line: what a user has written forges no other."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        characters = (each if each.isprintable() else each.encode("unicode_escape").decode() for each in record.message)
        record.message = "".join(characters)
        return super().formatMessage(record)


class _JsonLines(logging.Formatter):
    def __init__(self, job: str) -> None:
        super().__init__()
        self._job = job

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "job": self._job,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, "fields", None)
        if fields is not None:
            entry["fields"] = fields
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def set_up_logging(job: str, level: str, line_format: str) -> None:
    """Log to stderr, as text or as one JSON object per line. May be called again when the configuration changes."""
    handler = logging.StreamHandler(sys.stderr)
    text = _TextLines(f"%(asctime)s %(levelname)s [{job}] %(name)s: %(message)s")
    handler.setFormatter(_JsonLines(job) if line_format == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # kafka-python logs every attempt to reconnect to a broker that is down; the source reports that once.
    logging.getLogger("kafka").setLevel(logging.ERROR)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


class Backoff:
    """Waits of ``first`` seconds, doubling to ``longest``.

    Args:
        spread: largest share by which each wait is shortened at random, so that many waiters do not meet.
    """

    def __init__(self, first: float, longest: float, spread: float = 0.0) -> None:
        self._first = first
        self._longest = longest
        self._spread = spread
        self._next = first

    def seconds(self) -> float:
        """Return the next wait."""
        wait, self._next = self._next, min(self._longest, self._next * 2)
        return wait * (1.0 - self._spread * random.random())

    def reset(self) -> None:
        """Begin with ``first`` again."""
        self._next = self._first


_log = logging.getLogger(__name__)

# Exit status of a daemon that ended in order because it could not trust its state any more.
EXIT_UNSAFE_STATE = 8
FIRST_BACKOFF_SECONDS = 0.25
MAX_BACKOFF_SECONDS = 30.0


class UnsafeStateError(FlexdError):
    """Raised by the body of a thread that cannot go on: what it was changing may be half changed."""


@dataclass(frozen=True)
class ThreadProblem:
    """Work that fails at present.

    Attributes:
        thread: name of the thread.
        work: the part of its work; empty if the thread does one thing.
        error: type and text of the newest exception.
        faults: exceptions since the last progress.
    """

    thread: str
    work: str
    error: str
    faults: int

    def __str__(self) -> str:
        work = f" ({self.work})" if self.work else ""
        times = f", {self.faults} times in a row" if self.faults > 1 else ""
        return f"thread {self.thread}{work}: {self.error}{times}"


class Watch:
    """The faults of one piece of a thread's work. Belongs to that thread; any thread may read.

    Args:
        thread, work: see ``ThreadProblem``.
        clock: monotonic seconds.
    """

    def __init__(self, thread: str, work: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.thread = thread
        self.work = work
        # Exceptions since the start.
        self.faults = 0
        self.problem: ThreadProblem | None = None
        self._clock = clock
        self._backoff = Backoff(FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
        self._retry_at = 0.0
        self._kinds: dict[tuple[str, str], int] = {}

    @property
    def seconds_to_retry(self) -> float:
        """Seconds until the work may be attempted again; 0 if it is due."""
        return max(0.0, self._retry_at - self._clock()) if self._retry_at else 0.0

    def attempt(self, work: Callable[[], object]) -> bool:
        """Do the work unless it is backed off from. Returns whether it was done; an exception is a fault."""
        if self.seconds_to_retry > 0:
            return False
        try:
            work()
        except Exception as error:
            self.fault(error)
            return False
        self.progress()
        return True

    def fault(self, error: BaseException) -> None:
        """Record an exception, and back off before the next attempt."""
        in_a_row = 1 if self.problem is None else self.problem.faults + 1
        self._retry_at = self._clock() + self._backoff.seconds()
        # The problem first: whoever sees the counter must not read that nothing fails.
        self.problem = ThreadProblem(self.thread, self.work, _text(error), in_a_row)
        self.count(error)

    def count(self, error: BaseException) -> None:
        """Record an exception that concerns one request only: it is counted and logged, and nothing waits."""
        self.faults += 1
        kind = (type(error).__name__, _origin(error.__traceback__))
        # Limit of kinds of faults that one thread remembers for its log.
        if kind not in self._kinds and len(self._kinds) >= 32:
            kind = ("other", "")
        times = self._kinds[kind] = self._kinds.get(kind, 0) + 1
        if is_power_of_two(times):
            _log.error(
                "thread %s%s: unexpected %s (%d times so far)", self.thread, f" ({self.work})" if self.work else "",
                _text(error), times, exc_info=error,
            )  # fmt: skip

    def progress(self) -> None:
        """Record that the work succeeds."""
        if self.problem is not None:
            _log.info("thread %s%s: works again", self.thread, f" ({self.work})" if self.work else "")
            self.rest()

    def rest(self) -> None:
        """Forget the problem and the back-off, because the work has been stopped or succeeds. Counters stay."""
        self.problem, self._retry_at = None, 0.0
        self._backoff.reset()


class SupervisedThread:
    """A daemon thread that repeats its body until a stop is requested.

    A body that raises, or that returns before the stop, has a fault: it is called again after the back-off. It calls
    ``Watch.progress`` whenever a round of its loop has succeeded.

    Args:
        watch: has the thread's name.
        body: the loop; returns soon after ``stopping`` is set.
        stopping: ends a back-off at once.
        finish: called once when the thread ends, even if the body never succeeded.
        end_daemon: called with an ``UnsafeStateError``, or what is no ``Exception``; the thread then ends.
    """

    def __init__(
        self,
        watch: Watch,
        body: Callable[[], None],
        stopping: threading.Event,
        finish: Callable[[], None] | None,
        end_daemon: Callable[[str, BaseException], None],
    ) -> None:
        self._watch = watch
        self._body = body
        self._stopping = stopping
        self._finish = finish
        self._end_daemon = end_daemon
        self._thread = threading.Thread(target=self._run, name=watch.thread, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end. Returns whether the thread has ended, or was never started."""
        if self.started:
            self._thread.join(max(0.0, timeout_seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._repeat()
        except BaseException as error:
            self._end_daemon(self._watch.thread, error)
        finally:
            if self._finish is not None:
                try:
                    self._finish()
                except Exception as error:
                    self._watch.count(error)
            self._watch.rest()

    def _repeat(self) -> None:
        while True:
            try:
                self._body()
                if not self._stopping.is_set():
                    raise RuntimeError("the loop has ended without a stop")
            except UnsafeStateError:
                raise
            except Exception as error:
                self._watch.fault(error)
            if self._stopping.wait(self._watch.seconds_to_retry):
                return


class Supervisor:
    """The threads of one process. Thread-safe.

    Attributes:
        fatal: why the daemon has to end; empty while it can go on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._watches: dict[tuple[str, str], Watch] = {}
        self.fatal = ""

    def watch(self, thread: str, work: str = "") -> Watch:
        """Return the watch of this thread and work. A second thread of the same name continues its counters."""
        with self._guard:
            return self._watches.setdefault((thread, work), Watch(thread, work, self._clock))

    def thread(
        self,
        name: str,
        body: Callable[[], None],
        stopping: threading.Event,
        finish: Callable[[], None] | None = None,
    ) -> SupervisedThread:
        """Return a thread, not started, that repeats ``body`` by the rule of this module."""
        return SupervisedThread(self.watch(name), body, stopping, finish, self.end_daemon)

    def job(self, name: str, body: Callable[[], object]) -> threading.Thread:
        """Start a thread that calls ``body`` once; an exception is counted and logged."""
        watch = self.watch(name)

        def run() -> None:
            try:
                body()
            except BaseException as error:
                watch.count(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def end_daemon(self, thread: str, error: BaseException) -> None:
        """Make the daemon stop all parts in order and exit with ``EXIT_UNSAFE_STATE``. Returns at once."""
        self.watch(thread).count(error)
        with self._guard:
            first, self.fatal = not self.fatal, self.fatal or f"thread {thread}: {_text(error)}"
        if first:
            _log.critical("the daemon ends, because it cannot go on safely: %s", self.fatal)

    def faults(self) -> dict[str, int]:
        """Return the exceptions since the start by thread, with 0 for a thread without any."""
        total: dict[str, int] = {}
        for (thread, _), watch in self._snapshot():
            total[thread] = total.get(thread, 0) + watch.faults
        return total

    def problems(self) -> tuple[ThreadProblem, ...]:
        """Return what fails at present."""
        return tuple(watch.problem for _, watch in self._snapshot() if watch.problem is not None)

    def reasons(self) -> tuple[str, ...]:
        """Return what fails at present, in words."""
        return (*((f"ending: {self.fatal}",) if self.fatal else ()), *map(str, self.problems()))

    def watch_uncaught(self) -> None:
        """Count and log what ends a thread of this process that is not supervised, such as one of a library."""

        def uncaught(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is not None and args.exc_type is not SystemExit:
                self.watch("other").count(args.exc_value)

        threading.excepthook = uncaught

    def _snapshot(self) -> list[tuple[tuple[str, str], Watch]]:
        with self._guard:
            return list(self._watches.items())


def _text(error: BaseException) -> str:
    text = str(error).split("\n", 1)[0][:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _origin(traceback: TracebackType | None) -> str:
    if traceback is None:
        return ""
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
