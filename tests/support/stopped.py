"""Processes that are stopped, and certainly so."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def state_of(pid: int) -> str:
    """The letter that the kernel gives: "T" if stopped."""
    return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]


def stop(pid: int, timeout_seconds: float = 10.0) -> None:
    """SIGSTOP, and waits: the signal is only noted when ``kill`` returns, and a thread may still answer a call."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + timeout_seconds
    while any(state_of(int(task.name)) != "T" for task in (Path("/proc") / str(pid) / "task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.01)
