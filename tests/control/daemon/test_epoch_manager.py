"""Beginning and ending of epochs with real connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flexd.control.daemon.migration_record import MigrationState
from flexd.control.daemon.pusher import ChunkLimits
from flexd.core.layout import RankLayout
from tests.support.ranks_in_threads import Ranks, migrate, target
from tests.support.until import until

pytestmark = pytest.mark.slow


def test_a_new_attempt_starts_from_an_empty_placement(host: Callable[..., Any]) -> None:
    hosted = host(chunks=ChunkLimits(1))
    with Ranks(hosted.port) as ranks:
        running = migrate(hosted.coordinator, "p1", target(1), 5)
        until(lambda: running.record.chunks_applied > 3)
        ranks.stop()
        with Ranks(hosted.port, RankLayout(1, 2), attempt="a2") as restarted:
            until(lambda: hosted.ready() and hosted.coordinator.live().attempt == "a2", what=restarted.state())
            assert running.state is MigrationState.FAILED
            assert hosted.coordinator.live().generation == 2
            assert hosted.coordinator.live().layout == RankLayout(1, 2)
            assert len(hosted.coordinator.placement()) == 0
            assert hosted.journal.segment.attempt == "a2"
            migration = migrate(hosted.coordinator, "p2", target(1), 50, generation=2)
            assert migration.wait(20) is MigrationState.COMMITTED
            assert restarted.all_at(target(1))


def test_a_silent_rank_is_reported_as_lost(host: Callable[..., Any]) -> None:
    hosted = host(timeout_seconds=1.5)
    with Ranks(hosted.port, RankLayout(2, 1)) as ranks:
        until(hosted.ready)
        agent = ranks.ranks[1].agent
        agent.stop(10)
        until(lambda: not hosted.ready())
        until(lambda: "1 of 2 ranks" in hosted.coordinator.live().reason)
        assert "rank_disconnected" in hosted.names()
        until(lambda: "rank_lost" in hosted.names())


def test_a_debug_run_takes_the_job_only_once_the_other_has_ended(host: Callable[..., Any]) -> None:
    hosted = host(timeout_seconds=1.5)

    def holder() -> str:
        live = hosted.coordinator.live()
        return live.attempt if live is not None and live.ready else ""

    with Ranks(hosted.port, attempt="prod", timeout_seconds=1.5) as prod:
        until(lambda: holder() == "prod")
        with Ranks(hosted.port, RankLayout(1, 1), attempt="debug", timeout_seconds=1.5) as debug:
            until(lambda: hosted.coordinator.status().attempts_waiting == 1, what=debug.state)
            until(lambda: "attempt 'prod' holds job 'job': 4 ranks, since" in debug.ranks[0].agent.state)
            assert (holder(), hosted.coordinator.status().epochs) == ("prod", 1)
            migration = migrate(hosted.coordinator, "p1", target(1), 50)
            assert migration.wait(20) is MigrationState.COMMITTED
            prod.stop()
            until(lambda: holder() == "debug", what=debug.state)
            assert hosted.coordinator.live().generation == 2
