"""Two daemons must not share a state directory."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from flexd.core.errors import StateLockedError
from flexd.daemon.state_files import StateLock


def test_a_killed_holder_leaves_no_lock(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from flexd.daemon.state_files import StateLock\n"
        "lock = StateLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(StateLockedError, match=rf"process {holder.pid}"):
        StateLock(tmp_path)
    holder.kill()
    holder.wait(10)
    StateLock(tmp_path).release()


def test_a_process_may_wait_for_the_lock_for_a_bounded_time(tmp_path):
    holder = StateLock(tmp_path)
    began = time.monotonic()
    with pytest.raises(StateLockedError, match="used by another daemon"):
        StateLock(tmp_path, wait_seconds=0.2)
    assert time.monotonic() - began >= 0.2
    threading.Timer(0.2, holder.release).start()
    StateLock(tmp_path, wait_seconds=60.0).release()
