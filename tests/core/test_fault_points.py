"""Fault points send their signal at the passage that was armed, and have no effect otherwise."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from flexd.core import fault_points as faults
from flexd.core.errors import ConfigError
from tests.support.repository import ROOT

PROGRAM = """
from flexd.core import fault_points as faults
faults.arm()
for passage in range(1, 4):
    print(passage, flush=True)
    faults.fault_point("chunk.sent")
    faults.fault_point("chunk.agreed")
"""


def passages(armed: str | None) -> tuple[int, list[str]]:
    environ = {name: value for name, value in os.environ.items() if name != faults.VARIABLE}
    if armed is not None:
        environ[faults.VARIABLE] = armed
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, env=environ, cwd=ROOT, check=False
    )
    return done.returncode, done.stdout.split()


def test_an_unarmed_process_runs_to_its_end() -> None:
    assert passages(None) == (0, ["1", "2", "3"])


def test_an_armed_process_dies_at_the_named_passage() -> None:
    assert passages("chunk.agreed:2:kill") == (-signal.SIGKILL, ["1", "2"])
    assert passages("chunk.agreed:4:kill,epoch.live:1:kill") == (0, ["1", "2", "3"])


@pytest.mark.parametrize(
    "armed",
    [
        "nowhere:1:kill",
        "chunk.sent:0:kill",
        "chunk.sent:1:jump",
        "chunk.sent",
        ":::",
        "chunk.sent:3-2:kill",
        "chunk.sent:-:raise",
    ],
)
def test_invalid_entries_are_refused(armed: str) -> None:
    with pytest.raises(ConfigError, match="unset it"):
        faults.arm({faults.VARIABLE: armed})
    faults.fault_point("chunk.sent")


def test_an_armed_passage_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_armed", {})
    monkeypatch.setattr(faults, "_passed", {})
    faults.arm({faults.VARIABLE: "thread.drift:2-3:raise"})
    outcomes = []
    for _ in range(4):
        try:
            faults.fault_point("thread.drift")
            outcomes.append("passed")
        except faults.InjectedFaultError:
            outcomes.append("raised")
    assert outcomes == ["passed", "raised", "raised", "passed"]


def test_every_point_is_passed_at_exactly_one_place() -> None:
    sources = [path.read_text() for path in (ROOT / "flexd").rglob("*.py")]
    names = [name for source in sources for name in re.findall(r"fault_point\(\"([^\"]+)\"\)", source)]
    # ``replace_file`` passes two points of the file's name.
    for file in (name for source in sources for name in re.findall(r"replace_file\(.*, \"(\w+)\"\)", source)):
        names += [f"{file}.written", f"{file}.renamed"]
    assert sorted(names) == sorted((*faults.POINTS, *faults.THREAD_POINTS))
