"""Fault points send their signal at the passage that was armed, and have no effect otherwise."""

from __future__ import annotations

import os
import re
import signal

import pytest

from flexd.core import fault_points as faults
from flexd.core.errors import ConfigError
from tests.support.repository import ROOT


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


def test_an_armed_passage_raises_or_sends_its_signal_and_others_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[object] = []
    monkeypatch.setattr(faults, "_armed", {})
    monkeypatch.setattr(faults, "_passed", {})
    monkeypatch.setattr(os, "kill", lambda process, sent: outcomes.append(sent if process == os.getpid() else process))
    faults.arm({faults.VARIABLE: "thread.drift:2-3:raise,chunk.sent:1:kill,chunk.agreed:2:stop,epoch.live:1:kill"})
    for _ in range(4):
        for point in ("thread.drift", "chunk.sent", "chunk.agreed"):
            try:
                faults.fault_point(point)
            except faults.InjectedFaultError:
                outcomes.append("raised")
        outcomes.append("passed")
    assert outcomes == [
        signal.SIGKILL, "passed", "raised", signal.SIGSTOP, "passed", "raised", "passed", "passed"
    ]  # fmt: skip


def test_every_point_is_passed_at_exactly_one_place() -> None:
    sources = [path.read_text() for path in (ROOT / "flexd").rglob("*.py")]
    names = [name for source in sources for name in re.findall(r"fault_point\(\"([^\"]+)\"\)", source)]
    # ``replace_file`` passes two points of the file's name.
    for file in (name for source in sources for name in re.findall(r"replace_file\(.*, \"(\w+)\"\)", source)):
        names += [f"{file}.written", f"{file}.renamed"]
    assert sorted(names) == sorted((*faults.POINTS, *faults.THREAD_POINTS))
