"""A flag that a signal handler may set at any moment, also inside a method of the flag."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from flexd.core.signal_flag import SignalFlag
from tests.support.repository import ROOT

STORM = """
import signal, sys, time
from flexd.core.signal_flag import SignalFlag
flag = SignalFlag()
count = 0
def handler(*_):
    global count
    count += 1
    flag.set()
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    flag.clear()
    flag.wait(0.00001)
signal.setitimer(signal.ITIMER_REAL, 0)
print(count)
"""


def storm(seconds: float) -> int:
    """Return the number of signals that a process handled. Raises TimeoutExpired if it hangs."""
    done = subprocess.run(
        [sys.executable, "-c", STORM, str(seconds)], capture_output=True, text=True, timeout=seconds + 30,
        check=True, cwd=ROOT,
    )  # fmt: skip
    return int(done.stdout)


def test_signals_at_any_moment_do_not_block_the_flag() -> None:
    assert storm(1.5) > 100


def test_another_thread_waits_for_the_flag() -> None:
    flag = SignalFlag()
    assert not flag.is_set()
    assert flag.wait(0.01) is False
    threading.Timer(0.1, flag.set).start()
    began = time.monotonic()
    assert flag.wait(30.0) is True
    assert time.monotonic() - began < 29.0
    assert flag.is_set()
    assert flag.wait(30.0) is True
    flag.clear()
    assert not flag.is_set()
    assert flag.wait(0.01) is False


def test_flags_that_are_set_repeatedly_use_no_memory() -> None:
    flag = SignalFlag()
    for _ in range(1_000):
        flag.set()
        flag.clear()
    assert flag._wakeups.empty()
