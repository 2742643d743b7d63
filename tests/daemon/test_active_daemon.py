"""Daemons that refuse, and daemons that forward to the active one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flexd.api.interface import DaemonApi
from flexd.daemon.active_daemon import ActiveDaemon
from tests.support.fake_daemon import FakeDaemon

COMMANDS: tuple[Callable[[DaemonApi], object], ...] = (
    lambda api: api.inspect.ranks(0, 1),
    lambda api: api.planning.proposals(),
    lambda api: api.migrations.migrations(1, None),
    lambda api: api.plan(),
    lambda api: api.explain("items", None, 1),
    lambda api: api.replan("why", 0.0),
    lambda api: api.pause("why"),
    lambda api: api.resume(),
    lambda api: api.reload(),
    lambda api: api.preview_reload(),
)


class Switch(ActiveDaemon):
    def __init__(self, *daemons: DaemonApi) -> None:
        self.daemons = list(daemons)

    def active(self) -> DaemonApi:
        return self.daemons[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_forwarded_to_the_active_daemon(command: Callable[[DaemonApi], object]) -> None:
    first, second = FakeDaemon(), FakeDaemon()
    switch = Switch(first, second)  # type: ignore[arg-type]
    command(switch)
    before = len(first.calls)
    switch.daemons.reverse()
    command(switch)
    assert (len(first.calls), len(second.calls)) == (before, before)
