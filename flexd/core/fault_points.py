"""Named points at which a test kills or stops the process, or raises an exception. They have no effect in a process
that was not armed.

``FLEXD_FAULT_POINT=name:count:action[,name:count:action]`` arms ``flexd run``: when the process passes point ``name``
for the ``count``-th time it sends itself a signal, ``kill`` (SIGKILL) or ``stop`` (SIGSTOP, until it receives SIGCONT),
or it raises ``InjectedFaultError`` there (``raise``). Each entry acts once. ``first-last`` in place of ``count`` stands
for every passage from the one to the other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from flexd.core.errors import ConfigError

VARIABLE = "FLEXD_FAULT_POINT"

POINTS = (
    "hello.accepted", "epoch.begin", "epoch.announced", "epoch.settled", "epoch.go", "epoch.joined", "epoch.live",
    "epoch.end", "epoch.ended", "migration.started", "journal.begin", "journal.renamed", "journal.begun",
    "journal.append", "journal.appended", "chunk.announce", "chunk.announced", "chunk.half_sent", "chunk.sent",
    "chunk.agreed", "chunk.applied", "migration.finished", "snapshot.begin", "snapshot.copied", "snapshot.written",
    "snapshot.renamed", "snapshot.committed",
    "reset.saved", "reset.moved",
)  # fmt: skip
"""In the order in which a daemon first passes them, except for snapshots. Those from ``reset.saved`` on are
passed by ``flexd state reset``."""
POINTS_OF_A_JOB = POINTS[: POINTS.index("reset.saved")]
"""The points that the daemon of a training job passes again and again."""

THREAD_POINTS = (
    "thread.loop", "thread.planning", "thread.coordinator", "thread.channel", "thread.ingest", "thread.counting",
    "thread.drift", "thread.history", "thread.http",
)  # fmt: skip
"""One in the work of every thread of the daemon, for ``raise``."""

_ACTIONS: Mapping[str, signal.Signals | None] = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "raise": None}

_MAX_PASSAGES = 10_000


class InjectedFaultError(Exception):
    """Raised by a fault point that was armed with ``raise``."""


_armed: dict[str, dict[int, signal.Signals | None]] = {}
"""Signal, or None to raise, by point and number of the passage (from 1)."""
_passed: dict[str, int] = {}


def fault_point(name: str) -> None:
    """Record that the process passes point ``name``."""
    if _armed:
        _pass(name)


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
        if not known or action not in _ACTIONS or not 0 < len(passages) <= _MAX_PASSAGES or passages[0] < 1:
            _armed.clear()
            raise ConfigError(
                f"{VARIABLE}: {entry!r} is not a fault point",
                remedy="unset it, or give name:count:action (kill, stop, raise) with a point of core/fault_points.py",
            )
        _armed.setdefault(name, {}).update(dict.fromkeys(passages, _ACTIONS[action]))


def _pass(name: str) -> None:
    passage = _passed[name] = _passed.get(name, 0) + 1
    actions = _armed.get(name, {})
    if passage not in actions:
        return
    signal_to_send = actions.pop(passage)
    if signal_to_send is None:
        raise InjectedFaultError(f"{name} was armed to raise")
    os.kill(os.getpid(), signal_to_send)
