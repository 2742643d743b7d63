"""Abort and rollback over real inboxes and a real channel, and the history and log of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flexd.control.daemon import journal as journal_module
from flexd.control.daemon.migration import MigrationState
from flexd.core.errors import ApiError
from tests.support.executions_harness import LAYOUT, SECONDS, ExecutionsHarness
from tests.support.ranks_in_threads import Ranks, same_content, target
from tests.support.until import until

HELD_AFTER_CHUNKS = 30
"""A migration of 60 chunks is not complete when it is aborted, however busy the machine is."""


@pytest.fixture
def harness(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ExecutionsHarness]:
    made = ExecutionsHarness(tmp_path, timeout_seconds=getattr(request, "param", 4.0))
    yield made
    made.stop()


def test_an_abort_stops_at_a_chunk_and_reports_the_applied_rows(harness: ExecutionsHarness) -> None:
    with Ranks(harness.coordinator.port, LAYOUT) as ranks:
        until(harness.ready, SECONDS, ranks.state())
        harness.gate.permits = HELD_AFTER_CHUNKS
        execution = harness.start("p1", target(1))
        harness.wait_until_some_applied(execution)
        result = harness.commands.abort(rollback=False, reason="too slow", wait_seconds=SECONDS, requested_by="ann")
        progress = execution.record
        assert (result.outcome, progress.state) == ("stopped", MigrationState.ABORTED)
        assert 30 < progress.rows_applied == progress.rows_pushed < 600
        assert result.placement_version == progress.last_version == progress.chunks_applied
        applied = f"{progress.rows_applied} of 600 rows applied"
        assert applied in result.message
        assert applied in execution.record.problem
        assert f"version {progress.last_version}" in execution.record.problem
        until(lambda: all(len(each) == progress.rows_applied for each in ranks.placements), SECONDS)
        # A prefix of the plan: every row that moved is at its planned tier.
        assert all(np.array_equal(p.tiers, target(1).tiers_of(p.keys)) for p in ranks.placements)
        assert same_content(ranks.history)
        assert harness.record_manual_plan == [True], "the interval of automatic plans starts again"
        shown = harness.commands.migration("p1")
        assert (shown.requested_by, shown.parent_plan_id, shown.trigger) == ("ada", "before", "manual")
        until(lambda: harness.commands.migration("p1").settled, SECONDS)
        assert harness.commands.migration("latest").rows_applied == progress.rows_applied
        assert harness.states("p1") == ["PENDING", "PUSHING", "ABORTING", "ABORTED"]
        with pytest.raises(ApiError, match="no migration is running") as refused:
            harness.commands.abort(rollback=True, reason="", wait_seconds=0, requested_by="")
        assert refused.value.status == 409


def test_a_rollback_returns_to_where_the_migration_started(harness: ExecutionsHarness) -> None:
    with Ranks(harness.coordinator.port, LAYOUT) as ranks:
        until(harness.ready, SECONDS, ranks.state())
        first = target(1, 60)
        assert harness.start("p1", first).wait(SECONDS) is MigrationState.COMMITTED
        harness.gate.permits = HELD_AFTER_CHUNKS
        second = harness.start("p2", target(2))
        harness.gate.unlimited = lambda: second.done
        harness.wait_until_some_applied(second)
        result = harness.commands.abort(rollback=True, reason="worse", wait_seconds=SECONDS, requested_by="ann")
        assert result.outcome == "rolled_back", result
        assert ranks.all_at(first)
        assert same_content(ranks.history)
        assert result.rollback is not None
        assert (result.rollback.migration_id, result.rollback.parent_plan_id) == ("p2.rollback", "p2")
        assert result.rollback.rows_applied >= result.migration.rows_applied > 0
        until(lambda: harness.executions.live_plan_id == "p2.rollback", SECONDS)
        assert harness.executions.migrations == {"committed": 2, "aborted": 1}
        assert [each.plan_id for each in harness.history.newest_moves(9)] == ["p2.rollback", "p2", "p1"]
        assert [entry.migration_id for entry in harness.commands.migrations(10, None).migrations] == [
            "p2.rollback",
            "p2",
            "p1",
        ]
        assert [entry.migration_id for entry in harness.commands.migrations(10, MigrationState.ABORTED).migrations] == [
            "p2"
        ]
        rollback = harness.commands.migration("p2.rollback")
        assert (rollback.requested_by, rollback.reason) == ("ann", "rollback of p2: worse")


@pytest.mark.parametrize("harness", [1.5], indirect=True)
def test_an_abort_without_ranks_ends_a_waiting_migration(harness: ExecutionsHarness) -> None:
    with Ranks(harness.coordinator.port, LAYOUT) as ranks:
        until(harness.ready, SECONDS, ranks.state())
        harness.coordinator.pause()
    until(lambda: not harness.ready(), SECONDS)
    execution = harness.start("p1", target(1))
    result = harness.commands.abort(rollback=False, reason="", wait_seconds=SECONDS, requested_by="")
    assert (result.outcome, execution.state) == ("stopped", MigrationState.ABORTED)
    assert "nothing of it was pushed" in result.message
    harness.stopping.set()
    with pytest.raises(ApiError, match="shutting down"):
        harness.commands.abort(rollback=False, reason="", wait_seconds=0, requested_by="")


def test_no_rollback_after_a_restart_of_a_committed_or_compacted_migration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ExecutionsHarness(tmp_path)
    port = first.coordinator.port
    with Ranks(port, LAYOUT) as ranks:
        until(first.ready, SECONDS, ranks.state())
        assert first.start("p1", target(1, 60)).wait(SECONDS) is MigrationState.COMMITTED
        first.stop()
        second = ExecutionsHarness(tmp_path, port)
        until(second.ready, SECONDS, ranks.state())
        with pytest.raises(ApiError, match="no migration is running"):
            second.commands.abort(rollback=True, reason="", wait_seconds=0, requested_by="")
        # From now on the journal keeps next to nothing.
        monkeypatch.setattr(journal_module, "_COMPACT_ROWS", 20)
        monkeypatch.setattr(journal_module, "_ROLLBACK_ROWS", 20)
        second.gate.permits = HELD_AFTER_CHUNKS
        running = second.start("p2", target(2))
        until(lambda: running.record.chunks_applied == HELD_AFTER_CHUNKS, SECONDS)
        # One chunk stays in the journal: a journal without chunks does not name its newest migration.
        ranks.moving.clear()
        second.gate.permits = 1
        until(lambda: running.record.chunks_pushed == HELD_AFTER_CHUNKS + 1, SECONDS)
        second.stop()
        ranks.moving.set()
        third = ExecutionsHarness(tmp_path, port)
        try:
            until(third.ready, SECONDS, ranks.state())
            with pytest.raises(ApiError, match="migration p2 cannot be rolled back: placement version") as refused:
                third.commands.abort(rollback=True, reason="", wait_seconds=0, requested_by="")
            assert (refused.value.status, "flexd replan" in refused.value.remedy) == (409, True)
            assert third.executions.last is None
        finally:
            third.stop()
