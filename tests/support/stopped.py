"""Processes that are stopped, and certainly so."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.until import until


def state_of(pid: int) -> str:
    """Return the letter of the process state: "T" if stopped."""
    return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]


def stop(pid: int, timeout_seconds: float = 10.0) -> None:
    """Send SIGSTOP and wait: when ``kill`` returns the signal is only pending, and a thread may still serve a call."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path("/proc") / str(pid) / "task"
    until(
        lambda: all(state_of(int(task.name)) == "T" for task in tasks.iterdir()),
        timeout_seconds, f"all threads of process {pid} are stopped",
    )  # fmt: skip
