"""The whole channel with real connections, also with certificates; ranks are threads of this process."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexd.control.daemon.migration import MigrationRecord, MigrationState
from flexd.control.daemon.pusher import ChunkLimits
from flexd.core.placement import Placement, RankLayout
from tests.support.certificates import Authority
from tests.support.ranks_in_threads import Ranks, committed, migrate, same_content, target
from tests.support.until import until

pytestmark = pytest.mark.slow


def test_a_delta_reaches_every_rank(job: Callable[..., Any]) -> None:
    planned = target(1)
    with job() as (hosted, ranks):
        live = hosted.coordinator.live()
        assert (live.layout, live.generation, live.replica_slots) == (RankLayout(2, 2), 1, (20_000, 20_000))
        migration = migrate(hosted.coordinator, "p1", planned, 50, generation=1)
        assert migration.wait(20) is MigrationState.COMMITTED, (migration.record, hosted.events)
        assert ranks.all_at(planned)
        assert same_content(ranks.history)
        progress = migration.record
        assert (progress.chunks_pushed, progress.chunks_applied) == (12, 12)
        assert (progress.rows_pushed, progress.rows_applied, progress.pushed_bytes) == (600, 600, 6000)
        assert progress.last_version == 12
        assert hosted.coordinator.placement().digest() == planned.digest()
        until(lambda: {rank for rank, _ in hosted.reports} == {0, 1, 2, 3})
        status = hosted.coordinator.status()
        assert (status.refused_chunks, status.digest_mismatches) == (0, 0)


def test_pause_resume_and_abort_leave_a_prefix(job: Callable[..., Any]) -> None:
    with job(chunks=ChunkLimits(1)) as (hosted, ranks):
        migration = migrate(hosted.coordinator, "p1", target(3), 10)
        until(lambda: migration.record.chunks_applied > 2)
        chunks = list(migration.delta.chunks(10))
        hosted.coordinator.pause()
        until(lambda: migration.record.chunks_applied == migration.record.chunks_pushed)
        pushed, steps = migration.record.chunks_pushed, ranks.steps
        until(lambda: ranks.steps > steps + 30)
        assert migration.record.chunks_pushed in (pushed, pushed + 1)
        assert migration.state is MigrationState.PUSHING
        hosted.coordinator.resume()
        until(lambda: migration.record.chunks_applied > pushed + 2)
        migration.abort("enough")
        assert migration.wait(10) is MigrationState.ABORTED
        assert f"{migration.record.rows_applied} of 600 rows applied" in migration.record.problem
        prefix = Placement.empty()
        for chunk in chunks[: migration.record.chunks_pushed]:
            prefix = prefix.apply(chunk)
        until(lambda: ranks.all_at(prefix))
        assert len(prefix) < 600


WRONG = SimpleNamespace(delta=target(1, 20).delta_to(Placement.empty()), row_bytes=np.zeros(20, np.int64))


@pytest.mark.parametrize(
    ("plan", "generation", "reason"), [(WRONG, None, "are not at the tier"), (None, 7, "generation 7")]
)
def test_a_migration_that_cannot_be_made_fails_alone(
    job: Callable[..., Any], plan: Any, generation: int | None, reason: str
) -> None:
    with job(RankLayout(2, 1)) as (hosted, ranks):
        migration = hosted.coordinator.migrate(
            MigrationRecord(migration_id="bad", generation=generation), Placement.empty(), plan
        )
        assert migration.wait(15) is MigrationState.FAILED
        assert reason in migration.record.problem
        committed(hosted.coordinator, ranks, "good", target(9, 50), 1000)


def test_a_migration_over_certificates_alone(host: Callable[..., Any], tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    hosted = host(secret=None, tls=authority.issue("daemon", "127.0.0.1"))
    with Ranks(hosted.port, RankLayout(2, 1), secret=None, tls=authority.issue("rank")) as ranks:
        until(hosted.ready, what=ranks.state)
        committed(hosted.coordinator, ranks, "p1", target(1), 100)
    with Ranks(hosted.port, RankLayout(1, 1), attempt="a2", secret=None) as ranks:
        until(lambda: ranks.ranks[0].agent.state.startswith(("connecting:", "refused:")), what=ranks.state)
        until(lambda: hosted.coordinator.channel_counters().refused.get("tls", 0) >= 1)
