"""Settling and listing with real connections."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexd.control.daemon.migration_record import MigrationState
from flexd.core.layout import RankLayout
from tests.support.ranks_in_threads import Ranks, migrate, target
from tests.support.until import until

pytestmark = pytest.mark.slow


def test_a_lost_journal_is_replaced_by_listings_of_the_ranks(host: Callable[..., Any], tmp_path: Path) -> None:
    hosted = host()
    with Ranks(hosted.port, RankLayout(2, 3)) as ranks:
        first = migrate(hosted.coordinator, "p1", target(1), 100)
        assert first.wait(20) is MigrationState.COMMITTED
        hosted.close()
        again = host(tmp_path / "empty", port=hosted.port)
        until(again.ready, what=ranks.state())
        assert "placement_listed" in again.names()
        assert again.coordinator.placement().digest() == target(1).digest()
        assert again.coordinator.placement().version == 6
        second = migrate(again.coordinator, "p2", target(2), 100)
        assert second.wait(20) is MigrationState.COMMITTED
        assert ranks.all_at(target(2))


def test_one_rank_restarted_in_the_same_attempt_receives_no_chunks(host: Callable[..., Any]) -> None:
    hosted = host(timeout_seconds=2.0)
    with Ranks(hosted.port, RankLayout(2, 1)) as ranks:
        first = migrate(hosted.coordinator, "p1", target(1, 50), 10)
        assert first.wait(20) is MigrationState.COMMITTED
        ranks.ranks[1].agent.stop(10)
        with Ranks(hosted.port, RankLayout(2, 1)) as fresh:
            fresh.ranks[0].agent.stop(10)
            until(lambda: "do not agree" in hosted.coordinator.status().reason, what=str(hosted.events))
            assert not hosted.ready()
            assert fresh.history == [[], []]
