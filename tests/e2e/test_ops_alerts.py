"""A real Prometheus scrapes daemons that are in trouble: each alert of ``LIVE`` fires for the daemon that has it.

The rules are those of deploy/prometheus with shorter ranges and ages and without ``for``, so that hours become seconds;
that they wait as long as they say is tested by promtool (tests/deploy/test_alerts.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.alarming import Alarms
from tests.support.alert_occurrences import LIVE
from tests.support.flexd_processes import flexd
from tests.support.ops_tools import tool
from tests.support.prometheus import Prometheus, shortened
from tests.support.repository import ROOT
from tests.support.until import until

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(420)]

DEADLINE_SECONDS = 300
RUNBOOK = ROOT / "docs" / "runbook.md"


class Occurred(NamedTuple):
    """The daemons, which still run, and (alert, daemon or job) of all alerts that fired."""

    alarms: Alarms
    fired: set[tuple[str, str]]


@pytest.fixture(scope="module")
def occurred(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Occurred]:
    tool("prometheus")
    directory: Path = tmp_path_factory.mktemp("alerts")
    alarms = Alarms(directory)
    names = {daemon.target: daemon.name for daemon in alarms.daemons.values()}
    expected = {(alert, live.daemon) for alert, live in LIVE.items()}
    try:
        alarms.prometheus = Prometheus(directory, list(names), shortened)
        until(alarms.prometheus.is_ready, 60, "prometheus does not answer")
        scenarios = alarms.scenarios()
        waits = dict.fromkeys(scenarios, lambda: True)
        found: set[tuple[str, str]] = set()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not expected <= found and time.monotonic() < deadline:
            for name, scenario in scenarios.items():
                if waits[name]():
                    waits[name] = next(scenario)
            found = {(alert, names.get(where, where)) for alert, where in alarms.fired()}
            time.sleep(0.1)
        yield Occurred(alarms, found)
    finally:
        alarms.close()
        if hasattr(alarms, "prometheus"):
            alarms.prometheus.close()


@pytest.mark.parametrize("alert", LIVE)
def test_alert_fires_for_the_daemon_in_trouble(alert: str, occurred: Occurred) -> None:
    assert (alert, LIVE[alert].daemon) in occurred.fired, LIVE[alert].condition


def test_a_daemon_that_reads_its_stream_raises_no_alert_of_the_stream(occurred: Occurred) -> None:
    assert ("FlexdStreamUnreachable", "stream") not in occurred.fired, "it only cannot write snapshots"


@pytest.mark.parametrize(
    ("alert", "daemon", "command", "shown"),
    [
        ("FlexdThreadFails", "proposes", "status", "thread flexd-drift: InjectedFaultError"),
        ("FlexdProposalsWait", "proposes", "proposals", "interval"),
        ("FlexdMessagesLost", "stream", "status", "  lost "),
        ("FlexdPlansRefused", "stream", "plan", "planner.min_samples"),
        ("FlexdSnapshotsFail", "stream", "status", "Not a directory"),
        ("FlexdMigrationsFail", "fails", "history --state failed", "FAILED"),
        ("FlexdRanksMissing", "missing", "status", "missing"),
        ("FlexdAttemptWaits", "idle", "attempts list", "waiting"),
        ("FlexdAttemptWaits", "idle", "attempts prefer a2 --yes", "the job is kept for attempt a2"),
        ("FlexdPlacementDistrusted", "moves", "status", "(by flexd)"),
        ("FlexdPlacementDistrusted", "moves", "resume --yes", "running"),
    ],
)
def test_commands_of_the_runbook_show_what_it_says(
    alert: str, daemon: str, command: str, shown: str, occurred: Occurred
) -> None:
    section = RUNBOOK.read_text().split(f"## {alert}\n")[1].split("\n## ")[0]
    assert f"flexd {' '.join(command.split()[:2])}".removesuffix(" --yes") in section
    done = flexd(*command.split(), "--url", f"http://{occurred.alarms.daemons[daemon].target}")
    assert shown in done.stdout + done.stderr
