"""Named points at which a test kills or stops the process. They have no effect in a process that was not armed.

``FLEXD_FAULT_POINT=name:count:action[,name:count:action]`` arms ``flexd run``: when the process passes point ``name``
for the ``count``-th time it sends itself a signal: ``kill`` (SIGKILL) or ``stop`` (SIGSTOP, until it receives SIGCONT).
Each entry acts once.
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
)  # fmt: skip
"""In the order in which a daemon first passes them, snapshots aside."""

_ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

_armed: dict[str, dict[int, signal.Signals]] = {}
"""Signal by point and number of the passage (from 1)."""
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
        if name not in POINTS or not count.isdecimal() or int(count) < 1 or action not in _ACTIONS:
            _armed.clear()
            raise ConfigError(
                f"{VARIABLE}: {entry!r} is not a fault point",
                remedy="unset it, or give name:count:action (kill, stop) with a point of core/fault_points.py",
            )
        _armed.setdefault(name, {})[int(count)] = _ACTIONS[action]


def _pass(name: str) -> None:
    _passed[name] = _passed.get(name, 0) + 1
    signal_to_send = _armed.get(name, {}).pop(_passed[name], None)
    if signal_to_send is not None:
        os.kill(os.getpid(), signal_to_send)
