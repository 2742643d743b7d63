"""The benchmark of the control plane, small: plans one after another, and many simulated ranks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.repository import ROOT

pytestmark = pytest.mark.alone

TOOL = ROOT / "tools" / "bench_control.py"


@pytest.mark.long
def test_a_rank_that_does_not_train_sends_a_message_a_second() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "--replans", "0", "--ranks", "0", "--one-rank", "2", "--json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert 0 < figures["one_rank/idle/messages_sent_per_second"] <= 2
    assert figures["one_rank/training/messages_sent_per_second"] > figures["one_rank/idle/messages_sent_per_second"]
    assert figures["one_rank/idle/bytes_sent_per_second"] < 2_000


@pytest.mark.long
def test_replans_leave_nothing_behind_and_many_ranks_agree() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "--quick", "--json"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode in (0, 1), done.stderr[-3000:]
    last = json.loads(done.stdout.splitlines()[-1])
    # A figure of time says nothing on a shared machine; the others are exact or have room.
    failed = [entry for entry in last["checks"] if not entry["ok"] and "median" not in entry["name"]]
    assert failed == []
    assert last["figures"]["replans/replans"] == 60
    assert last["figures"]["replans/rows_moved"] > 60
    assert last["figures"]["ranks/bytes_to_a_rank"] == 10 * last["figures"]["ranks/rows"]
