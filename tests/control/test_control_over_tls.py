"""Ranks with certificates and no secret register, take a migration, and are refused without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexd.control.daemon.migration_record import MigrationState
from flexd.core.layout import RankLayout
from tests.support.certificates import Authority
from tests.support.ranks_in_threads import Ranks, migrate, target
from tests.support.until import until


def test_a_migration_over_certificates_alone(host: Callable[..., Any], tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    hosted = host(secret=None, tls=authority.issue("daemon", "127.0.0.1"))
    with Ranks(hosted.port, RankLayout(2, 1), secret=None, tls=authority.issue("rank")) as ranks:
        until(hosted.ready, what=ranks.state)
        migration = migrate(hosted.coordinator, "p1", target(1), 100)
        assert migration.wait(30) is MigrationState.COMMITTED
        assert ranks.all_at(target(1))
    with Ranks(hosted.port, RankLayout(1, 1), attempt="a2", secret=None) as ranks:
        until(lambda: ranks.ranks[0].agent.state.startswith(("connecting:", "refused:")), what=ranks.state)
        until(lambda: hosted.coordinator.channel_counters().refused.get("tls", 0) >= 1)
