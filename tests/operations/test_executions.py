"""Abort and rollback over real inboxes and a real channel, and the history and log of them."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from flexd.api.migration import AbortResult
from flexd.control.daemon import journal as journal_module
from flexd.control.daemon.migration import Migration, MigrationState
from flexd.core.errors import ApiError, SnapshotError
from flexd.operations.decisions import NAME, DecisionFile, StateDatabase
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
        assert (result.rollback.migration_id, result.rollback.parent_plan_id) == ("p2.rollback", "p2")
        assert result.rollback.rows_applied >= result.migration.rows_applied > 0
        until(lambda: harness.executions.live_plan_id == "p2.rollback", SECONDS)
        assert harness.executions.migrations == {"committed": 2, "aborted": 1}
        assert [each.plan_id for each in harness.history.newest_moves(9)] == ["p2.rollback", "p2", "p1"]
        (aborted,) = harness.commands.migrations(10, MigrationState.ABORTED).migrations
        assert aborted.migration_id == "p2"
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


def _copied(source: str, target: str) -> None:
    """Copy a file of live state, unless it has been renamed since it was listed."""
    with suppress(FileNotFoundError):
        shutil.copy2(source, target)


class DaemonSequence:
    """One daemon after another at one address. ``crash`` starts the next one on a copy of the state directory that was
    made while its predecessor ran, as SIGKILL would leave it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        self.current = self._start(directory / "0", 0)
        self.port = self.current.coordinator.port

    def _start(self, state: Path, port: int) -> ExecutionsHarness:
        state.mkdir(exist_ok=True)
        return ExecutionsHarness(state, port)

    def crash(self, between: Callable[[], object] = lambda: None) -> None:
        assert self.current.history.write()
        before, self._count = self._directory / str(self._count), self._count + 1
        shutil.copytree(before, self._directory / str(self._count), copy_function=_copied)
        self.restart(between)

    def restart(self, between: Callable[[], object] = lambda: None) -> None:
        self.current.stop()
        between()
        self.current = self._start(self._directory / str(self._count), self.port)
        until(self.current.ready, SECONDS)

    def wait_until_applied(self, chunks: int) -> None:
        """Wait until the newest migration has applied ``chunks`` chunks, all that the gate permitted."""
        until(lambda: self.current.gate.permits == 0 and self.migration.record.chunks_applied == chunks, SECONDS)

    @property
    def migration(self):  # type: ignore[no-untyped-def]
        return self.current.executions.last

    def abort(self, chunks: int, wait_seconds: float = 0.0) -> AbortResult:
        """Request ``rollback`` and permit the rollback, and nothing else, to push ``chunks`` chunks."""
        before = self.current.executions.last
        if before is None:
            self.current.gate.permits = chunks
        done = self.current.commands.abort(rollback=True, reason="worse", wait_seconds=wait_seconds, requested_by="ann")
        if before is not None and chunks:
            until(lambda: before.done, SECONDS)
            self.current.gate.permits = chunks
        return done

    def _states(self) -> dict[str, str]:
        return {each.migration_id: each.state.name for each in self.current.commands.migrations(10, None).migrations}

    def states(self) -> dict[str, str]:
        """Return the state of every migration in the history, by id, once the newest has its present state."""
        last = self.migration
        until(lambda: self._states().get(last.migration_id) == last.state.name, SECONDS)
        return self._states()


@pytest.fixture
def daemons(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = DaemonSequence(tmp_path)
    yield made
    made.current.stop()


PARENT = target(1, 60)


@pytest.fixture
def ranks(daemons: DaemonSequence) -> Iterator[Ranks]:
    """Yield ranks that have applied p1, and 20 chunks of p2."""
    with Ranks(daemons.port, LAYOUT) as made:
        until(daemons.current.ready, SECONDS, made.state())
        assert daemons.current.start("p1", PARENT).wait(SECONDS) is MigrationState.COMMITTED
        daemons.current.gate.permits = 20
        daemons.current.start("p2", target(2))
        daemons.wait_until_applied(20)
        yield made


@pytest.mark.parametrize(
    ("killed", "pushed"),
    [
        (True, 0),
        (False, 3),
        pytest.param(True, 3, marks=pytest.mark.long),
        pytest.param(False, 0, marks=pytest.mark.long),
    ],
)
def test_the_next_daemon_resumes_a_rollback_by_itself(
    daemons: DaemonSequence, ranks: Ranks, killed: bool, pushed: int
) -> None:
    daemons.abort(pushed)
    until(lambda: daemons.migration.migration_id == "p2.rollback", SECONDS)
    until(lambda: daemons.migration.state is MigrationState.PUSHING, SECONDS)
    daemons.wait_until_applied(pushed)
    until(lambda: "p2.rollback" in daemons.states(), SECONDS)
    daemons.crash() if killed else daemons.restart()
    assert daemons.current.executions.resume_rollback() is True
    assert daemons.current.executions.resume_rollback() is False, "it is running"
    assert daemons.migration.wait(SECONDS) is MigrationState.COMMITTED
    assert ranks.all_at(PARENT)
    assert same_content(ranks.history)
    versions = [version for version, _ in ranks.history[0]]
    assert versions == list(range(1, len(versions) + 1)), "the journal was continued"
    states = daemons.states()
    assert (states["p2"], states["p2.rollback"], states["p2.rollback-2"]) == ("ABORTED", "FAILED", "COMMITTED")
    entry = daemons.current.commands.migration("p2.rollback-2")
    assert (entry.requested_by, "the daemon ended before it was done" in entry.reason) == ("flexd", True)
    until(lambda: daemons.current.history.find("p2.rollback-2").settled, SECONDS)
    daemons.crash()
    assert daemons.current.executions.resume_rollback() is False, "it is committed"


def test_a_rollback_requested_before_the_migration_ended_is_resumed(daemons: DaemonSequence, ranks: Ranks) -> None:
    ranks.moving.clear()
    daemons.current.gate.permits = 1
    until(lambda: daemons.migration.record.chunks_pushed == 21, SECONDS)
    stopped = daemons.migration
    daemons.abort(0)
    until(lambda: stopped.state is MigrationState.ABORTING, SECONDS)
    daemons.crash(ranks.moving.set)
    assert daemons.current.executions.resume_rollback() is True
    assert daemons.migration.wait(SECONDS) is MigrationState.COMMITTED
    assert ranks.all_at(PARENT)
    assert daemons.states()["p2"] == "FAILED"


def test_a_requested_rollback_is_on_disk_before_the_migration_is_aborted(
    daemons: DaemonSequence, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk: list[tuple[str, ...]] = []
    abort = Migration.abort

    def record_file(migration: Migration, reason: str) -> None:
        on_disk.append(DecisionFile(StateDatabase(tmp_path / "0" / NAME)).current.rollback)
        abort(migration, reason)

    monkeypatch.setattr(Migration, "abort", record_file)
    daemons.abort(0)
    assert on_disk[0] == ("p2",)


def test_a_rollback_requested_after_a_crash_is_resumed_after_a_second_crash(
    daemons: DaemonSequence, ranks: Ranks
) -> None:
    daemons.crash()
    daemons.abort(0)
    daemons.crash()
    with pytest.raises(ApiError, match="no migration is running"):
        daemons.current.commands.abort(rollback=False, reason="", wait_seconds=0.0, requested_by="")
    assert daemons.current.executions.resume_rollback() is True, "the refused abort has cancelled nothing"
    assert daemons.migration.wait(SECONDS) is MigrationState.COMMITTED
    assert ranks.all_at(PARENT)


def test_an_aborted_rollback_is_not_resumed(daemons: DaemonSequence, ranks: Ranks) -> None:
    daemons.abort(0)
    until(lambda: daemons.migration.state is MigrationState.PUSHING, SECONDS)
    stopped = daemons.current.commands.abort(rollback=False, reason="", wait_seconds=SECONDS, requested_by="")
    assert stopped.outcome == "stopped"
    daemons.crash()
    assert daemons.current.executions.resume_rollback() is False
    assert daemons.current.executions.last is None


@pytest.mark.parametrize("pushed", [0, 3])
def test_a_rollback_of_a_committed_plan_is_resumed(daemons: DaemonSequence, ranks: Ranks, pushed: int) -> None:
    daemons.current.gate.permits = 1_000_000
    assert daemons.migration.wait(SECONDS) is MigrationState.COMMITTED
    daemons.current.gate.permits = pushed
    daemons.current.commands.rollback(
        migration_id="p2", to_version=None, reason="worse", wait_seconds=0.0, requested_by="ann"
    )
    until(lambda: daemons.migration.record.chunks_applied == pushed, SECONDS)
    until(lambda: "p2.rollback" in daemons.states(), SECONDS)
    daemons.crash()
    assert daemons.current.executions.resume_rollback() is True
    assert daemons.migration.wait(SECONDS) is MigrationState.COMMITTED
    assert ranks.all_at(PARENT)
    states = daemons.states()
    assert (states["p2"], states["p2.rollback"], states["p2.rollback-2"]) == ("COMMITTED", "FAILED", "COMMITTED")


def test_all_copies_are_home_also_if_a_daemon_ends_on_the_way(
    daemons: DaemonSequence, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The journal has forgotten what was before p2.
    monkeypatch.setattr(journal_module, "_ROLLBACK_ROWS", 100)
    daemons.current.gate.permits = 1_000_000
    assert daemons.migration.wait(SECONDS) is MigrationState.COMMITTED
    daemons.current.gate.permits = 3
    daemons.current.commands.rollback(migration_id="", to_version=0, reason="", wait_seconds=0.0, requested_by="ann")
    daemons.wait_until_applied(3)
    daemons.crash()
    assert daemons.current.executions.resume_rollback() is True
    assert daemons.migration.wait(SECONDS) is MigrationState.COMMITTED
    assert ranks.all_at(target(1, 0))


def test_a_full_disk_does_not_prevent_a_rollback(
    daemons: DaemonSequence, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemons.current.file, "write", Mock(side_effect=SnapshotError("no space left")))
    assert daemons.abort(1_000_000).outcome == "accepted"
    assert daemons.migration.wait(SECONDS) is MigrationState.COMMITTED
    assert ranks.all_at(PARENT)
    assert daemons.current.decisions.failures == 1


@pytest.mark.parametrize("killed", [True, False])
def test_a_preview_reports_the_rows_that_a_rollback_after_the_end_of_a_daemon_moves(
    daemons: DaemonSequence, ranks: Ranks, killed: bool
) -> None:
    daemons.crash() if killed else daemons.restart()
    preview = daemons.current.commands.preview_abort(rollback=True)
    assert (preview.migration.migration_id, preview.migration.state) == ("p2", MigrationState.FAILED)
    assert daemons.current.executions.last is None, "a preview starts nothing"
    with pytest.raises(ApiError, match="no migration is running"):
        daemons.current.commands.preview_abort(rollback=False)
    rollback = daemons.abort(1_000_000, SECONDS)
    assert (rollback.outcome, rollback.migration.state) == ("rolled_back", MigrationState.FAILED)
    assert ranks.all_at(PARENT)
    assert (rollback.rollback.requested_by, rollback.rollback.parent_plan_id) == ("ann", "p2")
    assert rollback.rollback.rows_applied == preview.rollback.promotions + preview.rollback.demotions > 0
    assert rollback.rollback.bytes_to_copy == preview.rollback.bytes
    with pytest.raises(ApiError, match="no migration is running"):
        daemons.current.commands.preview_abort(rollback=True)
