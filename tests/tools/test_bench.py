"""Every case of ``tools/bench`` runs quickly and ends with one JSON object; counts and bytes meet their targets."""

import json
import re
import subprocess
import sys

import pytest

from tests.support.repository import ROOT, child_environment
from tools.bench.harness import cases

pytestmark = pytest.mark.alone

TIMED = re.compile(
    r"second|\bms\b|ids/s|share of|exposed|p99|step|torch|datasketches|extra cost|over count-min|idle_|ready_"
)
"""Checks of time, which a busy machine may miss."""
SHORT = ("planner",)
"""Cases that `make test` runs too."""


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in cases()]
)
def test_a_quick_run_ends_with_figures_and_checks(name: str) -> None:
    command = [sys.executable, "-m", "tools.bench", name, "--quick", "--json"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=False, env=child_environment()
    )
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    last = json.loads(done.stdout.splitlines()[-1])
    assert all(isinstance(value, float) for value in last["figures"].values())
    for entry in last["checks"]:
        assert entry.keys() == {"name", "value", "target", "ok"}
        assert entry["ok"] or TIMED.search(entry["name"]), entry
    assert done.returncode == (0 if all(entry["ok"] for entry in last["checks"]) else 1)
    assert last["checks"] or "skipped: " in done.stdout
