"""Abort and rollback over real inboxes and a real channel, and what is written of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flexd.control.daemon import journal as journal_module
from flexd.control.daemon.migration_states import MigrationState
from flexd.core.errors import ApiError
from tests.support.executions_setting import LAYOUT, SECONDS, Setting
from tests.support.ranks_in_threads import Ranks, same_content, target
from tests.support.until import until


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(tmp_path)
    yield made
    made.end()


def test_an_abort_stops_at_a_chunk_and_says_where(setting: Setting) -> None:
    with Ranks(setting.coordinator.port, LAYOUT) as ranks:
        until(setting.ready, SECONDS, ranks.state())
        execution = setting.start("p1", target(1))
        setting.some_applied(execution)
        result = setting.commands.abort(rollback=False, reason="too slow", wait_seconds=SECONDS, who="ann")
        progress = execution.migration.progress
        assert (result.outcome, progress.state) == ("stopped", MigrationState.ABORTED)
        assert 30 < progress.rows_applied == progress.rows_pushed < 600
        assert result.placement_version == progress.last_version == progress.chunks_applied
        where = f"{progress.rows_applied} of 600 rows applied"
        assert where in result.message
        assert where in execution.migration.reason
        assert f"version {progress.last_version}" in execution.migration.reason
        until(lambda: all(len(each) == progress.rows_applied for each in ranks.placements), SECONDS)
        # A prefix of the plan: every row that moved is where the plan wants it.
        assert all(np.array_equal(p.tiers, target(1).tiers_of(p.keys)) for p in ranks.placements)
        assert same_content(ranks.history)
        assert setting.record_manual_plan == [True], "the interval begins anew"
        shown = setting.commands.migration("p1")
        assert (shown.who, shown.parent_plan_id, shown.trigger) == ("ada", "before", "manual")
        until(lambda: setting.commands.migration("p1").settled, SECONDS)
        assert setting.commands.migration("latest").rows_applied == progress.rows_applied
        assert setting.states("p1") == ["PENDING", "PUSHING", "ABORTING", "ABORTED"]
        with pytest.raises(ApiError, match="no migration is running") as refused:
            setting.commands.abort(rollback=True, reason="", wait_seconds=0, who="")
        assert refused.value.status == 409


def test_a_rollback_returns_to_where_the_migration_started(setting: Setting) -> None:
    with Ranks(setting.coordinator.port, LAYOUT) as ranks:
        until(setting.ready, SECONDS, ranks.state())
        first = target(1, 60)
        assert setting.start("p1", first).migration.wait(SECONDS) is MigrationState.COMMITTED
        second = setting.start("p2", target(2))
        setting.some_applied(second)
        result = setting.commands.abort(rollback=True, reason="worse", wait_seconds=SECONDS, who="ann")
        assert result.outcome == "rolled_back", result
        assert ranks.all_at(first)
        assert same_content(ranks.history)
        assert result.rollback is not None
        assert (result.rollback.migration_id, result.rollback.parent_plan_id) == ("p2.rollback", "p2")
        assert result.rollback.rows_applied >= result.migration.rows_applied > 0
        until(lambda: setting.executions.live_plan_id == "p2.rollback", SECONDS)
        assert setting.executions.migrations == {"committed": 2, "aborted": 1}
        assert [entry["plan_id"] for entry in setting.log.entries] == ["p1", "p2", "p2.rollback"]
        assert [entry.migration_id for entry in setting.commands.migrations(10, None).migrations] == [
            "p2.rollback",
            "p2",
            "p1",
        ]
        assert [entry.migration_id for entry in setting.commands.migrations(10, "ABORTED").migrations] == ["p2"]
        back = setting.commands.migration("p2.rollback")
        assert (back.who, back.reason) == ("ann", "rollback of p2: worse")


def test_what_waits_behind_an_aborted_migration_is_not_started(setting: Setting) -> None:
    with Ranks(setting.coordinator.port, LAYOUT) as ranks:
        until(setting.ready, SECONDS, ranks.state())
        ranks.moving.clear()
        running = setting.start("p1", target(1))
        until(lambda: running.migration.progress.chunks_pushed > 0, SECONDS)
        waiting = setting.start("p2", target(2))
        result = setting.commands.abort(rollback=False, reason="", wait_seconds=0.0, who="")
        assert result.outcome == "accepted"
        ranks.moving.set()
        assert waiting.migration.wait(SECONDS) is MigrationState.ABORTED
        assert running.migration.wait(SECONDS) in (MigrationState.ABORTED, MigrationState.SUPERSEDED)
        assert waiting.migration.progress.chunks_pushed == 0


def test_an_abort_without_ranks_ends_what_waits(setting: Setting) -> None:
    with Ranks(setting.coordinator.port, LAYOUT) as ranks:
        until(setting.ready, SECONDS, ranks.state())
        setting.coordinator.pause()
    until(lambda: not setting.ready(), SECONDS)
    execution = setting.start("p1", target(1))
    result = setting.commands.abort(rollback=False, reason="", wait_seconds=SECONDS, who="")
    assert (result.outcome, execution.migration.state) == ("stopped", MigrationState.ABORTED)
    assert "nothing of it was pushed" in result.message
    setting.stopping.set()
    with pytest.raises(ApiError, match="shutting down"):
        setting.commands.abort(rollback=False, reason="", wait_seconds=0, who="")


def test_an_unknown_migration_is_not_found(setting: Setting) -> None:
    for name in ("p9", "latest"):
        with pytest.raises(ApiError, match="is kept") as missing:
            setting.commands.migration(name)
        assert missing.value.status == 404


@pytest.mark.parametrize("killed", [True, False])
def test_a_rollback_after_the_daemon_has_ended_in_the_middle(tmp_path: Path, killed: bool) -> None:
    first = Setting(tmp_path)
    port = first.coordinator.port
    with Ranks(port, LAYOUT) as ranks:
        until(first.ready, SECONDS, ranks.state())
        parent = target(1, 60)
        assert first.start("p1", parent).migration.wait(SECONDS) is MigrationState.COMMITTED
        running = first.start("p2", target(2))
        first.some_applied(running)
        first.end()
        if killed:
            # A daemon that is killed writes down no end of what it was doing.
            log = tmp_path / "plans.jsonl"
            log.write_text(log.read_text().splitlines(keepends=True)[0])
            for file in tmp_path.glob("migrations.sqlite*"):
                file.unlink()
        second = Setting(tmp_path, port)
        try:
            # In the middle: the ranks have neither what they had before nor what was wanted.
            until(second.ready, SECONDS, ranks.state())
            there = second.coordinator.placement()
            assert there.digest() not in (parent.digest(), target(2).digest())
            with pytest.raises(ApiError, match="no migration is running"):
                second.commands.abort(rollback=False, reason="", wait_seconds=0, who="")
            result = second.commands.abort(rollback=True, reason="worse", wait_seconds=SECONDS, who="ann")
            assert (result.outcome, result.migration.migration_id, result.migration.state) == (
                "rolled_back", "p2", "FAILED",
            )  # fmt: skip
            assert result.migration.base_version == running.migration.progress.base_version
            assert ranks.all_at(parent)
            assert same_content(ranks.history)
            assert second.coordinator.placement().digest() == parent.digest()
            until(lambda: second.executions.live_plan_id == "p2.rollback", SECONDS)
            entry = second.commands.migration("p2.rollback")
            assert (entry.who, entry.parent_plan_id, entry.reason) == ("ann", "p2", "rollback of p2: worse")
            with pytest.raises(ApiError, match="no migration is running"):
                second.commands.abort(rollback=True, reason="", wait_seconds=0, who="")
        finally:
            second.end()


def test_no_late_rollback_of_what_was_committed_or_is_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Setting(tmp_path)
    port = first.coordinator.port
    with Ranks(port, LAYOUT) as ranks:
        until(first.ready, SECONDS, ranks.state())
        assert first.start("p1", target(1, 60)).migration.wait(SECONDS) is MigrationState.COMMITTED
        until(lambda: first.log.newest, SECONDS)
        first.end()
        second = Setting(tmp_path, port)
        until(second.ready, SECONDS, ranks.state())
        with pytest.raises(ApiError, match="no migration is running"):
            second.commands.abort(rollback=True, reason="", wait_seconds=0, who="")
        # From here on the journal keeps next to nothing.
        monkeypatch.setattr(journal_module, "_COMPACT_ROWS", 20)
        monkeypatch.setattr(journal_module, "_ROLLBACK_ROWS", 20)
        second.some_applied(second.start("p2", target(2)))
        second.end()
        third = Setting(tmp_path, port)
        try:
            until(third.ready, SECONDS, ranks.state())
            with pytest.raises(ApiError, match="migration p2 cannot be rolled back: placement version") as refused:
                third.commands.abort(rollback=True, reason="", wait_seconds=0, who="")
            assert (refused.value.status, "flexd replan" in refused.value.remedy) == (409, True)
            assert third.executions.last is None
        finally:
            third.end()
