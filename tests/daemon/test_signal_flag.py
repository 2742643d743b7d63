"""A flag that a signal handler may set at any moment, also while the interrupted thread looks at it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from flexd.daemon.signal_flag import SignalFlag
from tests.support.repository import ROOT

STORM = """
import signal, sys, time
from flexd.daemon.signal_flag import SignalFlag
flag = SignalFlag()
count = 0
def handler(*_):
    global count
    count += 1
    flag.set()
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    flag.clear()
    flag.wait(0.00001)
signal.setitimer(signal.ITIMER_REAL, 0)
print(count)
"""


def storm(seconds: float) -> int:
    """Signals that a process has outlived; a TimeoutExpired if it hangs."""
    done = subprocess.run(
        [sys.executable, "-c", STORM, str(seconds)], capture_output=True, text=True, timeout=seconds + 30,
        check=True, cwd=ROOT,
    )  # fmt: skip
    return int(done.stdout)


def test_a_storm_of_signals_finds_no_moment_in_which_it_hangs() -> None:
    assert storm(4.0) > 100


def test_it_is_waited_for_from_another_thread() -> None:
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
