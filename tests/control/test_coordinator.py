"""The whole channel with real stores and gloo groups; ranks are threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ranks_in_threads import Ranks, same_content, target, until

from flexd.control.migration import MigrationState
from flexd.layout import RankLayout


def test_a_delta_reaches_every_rank(host: Callable[..., Any]) -> None:
    hosted = host()
    wanted = target(1)
    with Ranks(hosted.port) as ranks:
        until(hosted.ready, what=ranks.state())
        live = hosted.coordinator.live()
        assert (live.layout, live.generation, live.replica_slots) == (RankLayout(2, 2), 1, (20_000, 20_000))
        delta = hosted.coordinator.placement().delta_to(wanted)
        migration = hosted.coordinator.migrate("p1", delta.chunks(50), generation=1)
        assert migration.wait(20) is MigrationState.COMMITTED, (migration.progress, hosted.events)
        assert ranks.all_at(wanted)
        assert same_content(ranks.history)
        progress = migration.progress
        assert (progress.chunks_pushed, progress.chunks_agreed, progress.chunks_applied) == (12, 12, 12)
        assert (progress.rows_pushed, progress.rows_applied, progress.bytes_pushed) == (600, 600, 6000)
        assert progress.last_version == 12
        assert hosted.coordinator.placement().digest() == wanted.digest()
        until(lambda: {rank for rank, _ in hosted.reports} == {0, 1, 2, 3})
        status = hosted.coordinator.status()
        assert (status.agreed_version, status.applied_version, status.refused_chunks) == (12, 12, 0)
        assert status.digest_mismatches == 0
