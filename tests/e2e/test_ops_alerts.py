"""A real Prometheus scrapes daemons that are in trouble: each alert of ``LIVE`` fires for the daemon that has it.

The rules are those of deploy/prometheus with shorter ranges and ages and without ``for``, so that hours become seconds;
that they wait as long as they say is tested by promtool (tests/deploy/test_alerts.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.alarming import Alarms
from tests.support.alert_occurrences import LIVE
from tests.support.ops_tools import tool
from tests.support.prometheus import Prometheus, shortened
from tests.support.until import until

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(420)]

DEADLINE_SECONDS = 300


@pytest.fixture(scope="module")
def fired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[set[tuple[str, str]]]:
    """(alert, daemon or job) of all alerts that fired while every scenario ran."""
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
        yield found
    finally:
        alarms.close()
        if hasattr(alarms, "prometheus"):
            alarms.prometheus.close()


@pytest.mark.parametrize("alert", LIVE)
def test_alert_fires_for_the_daemon_in_trouble(alert: str, fired: set[tuple[str, str]]) -> None:
    assert (alert, LIVE[alert].daemon) in fired, LIVE[alert].condition
