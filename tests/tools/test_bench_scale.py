"""The tool that measures a rank of a large job outside its steps."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.repository import ROOT, child_environment


def test_the_tool_prints_its_figures_and_checks() -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "tools" / "bench_scale.py", "--quick", "--json"],
        capture_output=True, text=True, timeout=120, check=False, env=child_environment(),
    )  # fmt: skip
    last = json.loads(run.stdout.splitlines()[-1])
    assert set(last["figures"]) >= {"start-up s", "entries of all ranks", "listing ms", "bits ms"}
    assert {title: made for title, made in last["figures"].items() if title.startswith("groups")} == {
        f"groups, {shape}: {made}": 2.0 * (1 + at)
        for shape in ("2x2", "16x8")
        for at, made in enumerate(("two collections", "and two loops"))
    }
    assert {entry["name"] for entry in last["checks"]} >= {"128 ranks: listing ms"}
    assert run.returncode == (0 if all(entry["ok"] for entry in last["checks"]) else 1), run.stderr
