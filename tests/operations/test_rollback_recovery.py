"""A daemon that dies in the middle of a rollback: asked again, the next one goes on to where the rollback was going."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy.typing as npt
import pytest

from flexd.api.abort import AbortResult
from flexd.control.daemon import journal as journal_module
from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_states import MigrationState
from flexd.control.daemon.throttle import Throttle
from flexd.core.errors import ApiError, SnapshotError
from flexd.operations import decisions as decisions_module
from flexd.operations.decisions import DecisionFile
from flexd.operations.history.store import ENDED_UNSEEN
from tests.support.executions_setting import LAYOUT, SECONDS, Setting
from tests.support.ranks_in_threads import Ranks, same_content, target
from tests.support.until import until


class Gate(Throttle):
    """Lets so many chunks through, and no more."""

    left = 1_000_000

    def __init__(self) -> None:
        super().__init__()
        self._open = threading.Event()
        self._open.set()
        self._met = threading.Event()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The pusher stands still before its next chunk: no migration begins, ends or is superseded meanwhile."""
        self._met.clear()
        self._open.clear()
        assert self._met.wait(SECONDS)
        try:
            yield
        finally:
            self._open.set()

    def release(self, row_bytes: npt.NDArray, outstanding_bytes: int, *, settled: bool = True) -> int:  # type: ignore[type-arg]
        if not self._open.is_set():
            self._met.set()
            assert self._open.wait(SECONDS)
        if self.left == 0:
            return 0
        self.left -= 1
        return super().release(row_bytes, outstanding_bytes, settled=settled)


class Lives:
    """One daemon after another at one address. Each finds what SIGKILL would have left of the one before: the state
    directory as it was at that moment."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        self.gate = Gate()
        self.now = self._begin(directory / "0", 0)
        self.port = self.now.coordinator.port

    def _begin(self, state: Path, port: int) -> Setting:
        state.mkdir(exist_ok=True)
        self.gate = Gate()
        return Setting(state, port, self.gate)

    def crash(self, then: Callable[[], object] = lambda: None) -> None:
        assert self.now.history.flush(SECONDS)
        before, self._count = self._directory / str(self._count), self._count + 1
        after = self._directory / str(self._count)
        shutil.copytree(before, after)
        self.now.end()
        then()
        self.now = self._begin(after, self.port)
        until(self.now.ready, SECONDS)

    def end_in_order(self) -> None:
        self.now.end()
        self.now = self._begin(self._directory / str(self._count), self.port)
        until(self.now.ready, SECONDS)

    def stopped_after(self, chunks: int) -> None:
        """Waits until the newest migration has applied so many chunks, all that the gate let through."""
        until(lambda: self.gate.left == 0 and self.migration.progress.chunks_applied == chunks, SECONDS)

    @property
    def migration(self):  # type: ignore[no-untyped-def]
        newest = self.now.executions.last
        assert newest is not None
        return newest.migration

    def abort(self, chunks: int, wait_seconds: float = 0.0) -> AbortResult:
        """``abort --rollback``; the rollback, and nothing else, may push so many chunks."""
        before = self.now.executions.last
        if before is None:
            self.gate.left = chunks
        done = self.now.commands.abort(rollback=True, reason="worse", wait_seconds=wait_seconds, who="ann")
        if before is not None and chunks:
            until(lambda: before.migration.done, SECONDS)
            self.gate.left = chunks
        return done

    def _in_history(self, migration_id: str) -> str:
        found = self.now.commands.migrations(10, None).migrations
        return next((each.state for each in found if each.migration_id == migration_id), "")

    def logged(self, plan_id: str) -> None:
        """Waits until the log of plans has it on disk: written after the history hears of its end."""
        file = self._directory / str(self._count) / "plans.jsonl"
        until(
            lambda: file.exists() and f'"plan_id": "{plan_id}"' in file.read_text() and file.read_text().endswith("\n"),
            SECONDS,
        )

    def told(self) -> dict[str, tuple[str, str]]:
        """(state, problem) of every migration in the history, by id, once it has the newest as it is now."""
        last = self.now.executions.last
        if last is not None:
            until(lambda: self._in_history(last.migration.migration_id) == last.migration.state.name, SECONDS)
        found = self.now.commands.migrations(10, None).migrations
        return {each.migration_id: (each.state, each.problem or "") for each in found}


@pytest.fixture
def lives(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = Lives(tmp_path)
    yield made
    made.now.end()


PARENT = target(1, 60)


def in_the_middle(lives: Lives, ranks: Ranks) -> None:
    """p1 is applied, and 20 chunks of p2."""
    until(lives.now.ready, SECONDS, ranks.state())
    assert lives.now.start("p1", PARENT).migration.wait(SECONDS) is MigrationState.COMMITTED
    lives.gate.left = 20
    lives.now.start("p2", target(2))
    lives.stopped_after(20)


@pytest.mark.parametrize("killed", [True, False])
def test_killed_in_the_middle_of_a_rollback_it_goes_on_when_it_is_asked_for_again(lives: Lives, killed: bool) -> None:
    end = lives.crash if killed else lives.end_in_order
    with Ranks(lives.port, LAYOUT) as ranks:
        in_the_middle(lives, ranks)
        assert lives.abort(3).outcome == "accepted"
        lives.stopped_after(3)
        end()
        there = lives.now.coordinator.placement()
        assert len(PARENT) < len(there) < len(PARENT) + 200, "neither where p2 had come nor where it began"
        again = lives.abort(2)
        assert (again.outcome, again.migration.migration_id) == ("accepted", "p2.rollback")
        lives.stopped_after(2)
        end()
        back = lives.abort(1_000_000, SECONDS)
        assert back.outcome == "rolled_back", back
        assert "version 6 is committed" in back.message
        assert ranks.all_at(PARENT)
        assert same_content(ranks.history)
        assert lives.now.coordinator.placement().digest() == PARENT.digest()
        told = lives.told()
        problem = ENDED_UNSEEN if killed else "the daemon is stopping"
        assert list(told) == ["p2.rollback-3", "p2.rollback-2", "p2.rollback", "p2", "p1"]
        assert [told[name][0] for name in told] == ["COMMITTED", "FAILED", "FAILED", "ABORTED", "COMMITTED"]
        assert told["p2.rollback"][1] == told["p2.rollback-2"][1] == problem
        entry = lives.now.commands.migration("p2.rollback-3")
        assert (entry.who, entry.reason) == ("ann", "rollback of p2.rollback-2: worse")
        with pytest.raises(ApiError, match="no migration is running"):
            lives.abort(0)


@pytest.mark.parametrize("killed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_killed_before_a_rollback_has_pushed_anything_it_can_be_asked_for_again(lives: Lives, killed: bool) -> None:
    with Ranks(lives.port, LAYOUT) as ranks:
        in_the_middle(lives, ranks)
        lives.abort(0)
        until(lambda: lives.migration.state is MigrationState.PUSHING, SECONDS)
        lives.logged("p2")
        lives.crash() if killed else lives.end_in_order()
        back = lives.abort(1_000_000, SECONDS)
        assert (back.outcome, back.migration.migration_id, back.migration.state) == ("rolled_back", "p2", "ABORTED")
        assert ranks.all_at(PARENT)
        told = lives.told()
        assert [told[name][0] for name in ("p2", "p2.rollback", "p2.rollback-2")] == ["ABORTED", "FAILED", "COMMITTED"]


@pytest.mark.parametrize(
    ("killed", "pushed"),
    [
        (True, 0),
        (False, 3),
        pytest.param(True, 3, marks=pytest.mark.long),
        pytest.param(False, 0, marks=pytest.mark.long),
    ],
)
def test_the_next_daemon_goes_on_with_a_rollback_by_itself(lives: Lives, killed: bool, pushed: int) -> None:
    with Ranks(lives.port, LAYOUT) as ranks:
        in_the_middle(lives, ranks)
        lives.abort(pushed)
        until(lambda: lives.migration.migration_id == "p2.rollback", SECONDS)
        until(lambda: lives.migration.state is MigrationState.PUSHING, SECONDS)
        lives.stopped_after(pushed)
        until(lambda: "p2.rollback" in lives.told(), SECONDS)
        lives.crash() if killed else lives.end_in_order()
        assert lives.now.late.resume() is True
        assert lives.now.late.resume() is False, "it is under way"
        assert lives.migration.wait(SECONDS) is MigrationState.COMMITTED
        assert ranks.all_at(PARENT)
        told = lives.told()
        assert [told[name][0] for name in ("p2", "p2.rollback", "p2.rollback-2")] == ["ABORTED", "FAILED", "COMMITTED"]
        entry = lives.now.commands.migration("p2.rollback-2")
        assert (entry.who, "the daemon ended before it was done" in entry.reason) == ("flexd", True)
        lives.logged("p2.rollback-2")
        lives.crash()
        assert lives.now.late.resume() is False, "it is done"


def test_a_lost_history_hides_no_rollback_that_was_asked_for(lives: Lives, tmp_path: Path) -> None:
    with Ranks(lives.port, LAYOUT) as ranks:
        in_the_middle(lives, ranks)
        lives.abort(0)
        lives.crash(lambda: [file.unlink() for file in (tmp_path / "1").glob("migrations.sqlite*")])
        lives.gate.left = 3
        assert lives.now.late.resume() is True
        lives.stopped_after(3)
        assert lives.migration.migration_id == "p2.rollback"
        lives.crash(lambda: [file.unlink() for file in (tmp_path / "2").glob("migrations.sqlite*")])
        assert lives.now.late.resume() is True
        assert lives.migration.migration_id == "p2.rollback-2", "chunks of another are in the journal under that id"
        assert lives.migration.wait(SECONDS) is MigrationState.COMMITTED
        assert ranks.all_at(PARENT)


def test_asked_for_and_killed_before_the_migration_had_ended_it_is_rolled_back(lives: Lives) -> None:
    with Ranks(lives.port, LAYOUT) as ranks:
        in_the_middle(lives, ranks)
        ranks.moving.clear()
        lives.gate.left = 1
        until(lambda: lives.migration.progress.chunks_pushed == 21, SECONDS)
        stopped = lives.migration
        lives.abort(0)
        until(lambda: stopped.state is MigrationState.ABORTING, SECONDS)
        lives.crash(ranks.moving.set)
        assert lives.now.late.resume() is True
        assert lives.migration.wait(SECONDS) is MigrationState.COMMITTED
        assert ranks.all_at(PARENT)
        assert lives.told()["p2"][0] == "FAILED"


def test_a_request_is_on_disk_before_anything_of_it_happens(
    lives: Lives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk: list[bytes] = []
    abort = Migration.abort

    def look(migration: Migration, reason: str) -> None:
        on_disk.append((tmp_path / "0" / "decisions.json").read_bytes())
        abort(migration, reason)

    monkeypatch.setattr(Migration, "abort", look)
    with Ranks(lives.port, LAYOUT) as ranks:
        in_the_middle(lives, ranks)
        lives.abort(0)
        (tmp_path / "then").write_bytes(on_disk[0])
        asked = DecisionFile(tmp_path / "then").current.rollback
        assert asked is not None
        assert asked.migration_ids == ("p2",)


def test_asked_for_after_a_crash_and_killed_before_it_has_pushed_anything(lives: Lives) -> None:
    with Ranks(lives.port, LAYOUT) as ranks:
        in_the_middle(lives, ranks)
        lives.crash()
        lives.abort(0)
        lives.crash()
        with pytest.raises(ApiError, match="no migration is running"):
            lives.now.commands.abort(rollback=False, reason="", wait_seconds=0.0, who="")
        assert lives.now.late.resume() is True, "what was refused has called nothing off"
        assert lives.migration.wait(SECONDS) is MigrationState.COMMITTED
        assert ranks.all_at(PARENT)


def test_a_rollback_that_was_called_off_is_not_gone_on_with(lives: Lives) -> None:
    with Ranks(lives.port, LAYOUT) as ranks:
        in_the_middle(lives, ranks)
        lives.abort(0)
        until(lambda: lives.migration.state is MigrationState.PUSHING, SECONDS)
        assert lives.now.commands.abort(rollback=False, reason="", wait_seconds=SECONDS, who="").outcome == "stopped"
        lives.crash()
        assert lives.now.late.resume() is False
        assert lives.now.executions.last is None


def test_a_rollback_that_cannot_be_is_not_left_for_later(lives: Lives) -> None:
    with Ranks(lives.port, LAYOUT) as ranks:
        in_the_middle(lives, ranks)
        lives.now.coordinator.live = lambda: None  # type: ignore[method-assign]
        with pytest.raises(ApiError, match="no rank is registered"):
            lives.abort(0)
        assert lives.now.decisions.current.rollback is None


def test_a_full_disk_is_not_in_the_way_of_a_rollback(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SnapshotError("no space left")

    monkeypatch.setattr(decisions_module, "replace_file", full)
    with Ranks(lives.port, LAYOUT) as ranks:
        in_the_middle(lives, ranks)
        assert lives.abort(1_000_000).outcome == "accepted"
        assert lives.migration.wait(SECONDS) is MigrationState.COMMITTED
        assert ranks.all_at(PARENT)
        assert lives.now.decisions.failures == 1


def test_nothing_goes_on_by_itself_that_nobody_has_asked_to_roll_back(lives: Lives) -> None:
    with Ranks(lives.port, LAYOUT) as ranks:
        in_the_middle(lives, ranks)
        lives.crash()
        assert lives.now.late.interrupted is not None
        assert lives.now.late.resume() is False
        assert lives.now.executions.last is None


def test_an_abort_without_rollback_is_no_offer_to_go_back_after_a_crash(lives: Lives) -> None:
    with Ranks(lives.port, LAYOUT) as ranks:
        in_the_middle(lives, ranks)
        assert lives.now.commands.abort(rollback=False, reason="", wait_seconds=SECONDS, who="").outcome == "stopped"
        lives.logged("p2")
        lives.crash()
        with pytest.raises(ApiError, match="no migration is running"):
            lives.abort(0)


def test_where_a_rollback_goes_is_not_folded_while_it_is_on_its_way(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_COMPACT_ROWS", 20)
    with Ranks(lives.port, LAYOUT) as ranks:
        in_the_middle(lives, ranks)
        lives.abort(10)
        lives.stopped_after(10)
        lives.crash()
        assert lives.abort(1_000_000, SECONDS).outcome == "rolled_back"
        assert ranks.all_at(PARENT)


def test_a_history_that_cannot_be_read_is_not_in_the_way(lives: Lives, tmp_path: Path) -> None:
    with Ranks(lives.port, LAYOUT) as ranks:
        in_the_middle(lives, ranks)
        lives.abort(3)
        lives.stopped_after(3)
        lives.crash()
        lives.now.history.stop(SECONDS)
        (tmp_path / "1" / "migrations.sqlite").write_bytes(b"not a database" * 100)
        assert lives.abort(1_000_000, SECONDS).outcome == "rolled_back"
        assert ranks.all_at(PARENT)


def test_a_preview_says_what_a_rollback_after_a_crash_would_move(lives: Lives) -> None:
    with Ranks(lives.port, LAYOUT) as ranks:
        in_the_middle(lives, ranks)
        lives.crash()
        preview = lives.now.commands.preview_abort(rollback=True)
        assert (preview.migration.migration_id, preview.migration.state) == ("p2", "FAILED")
        assert preview.rollback is not None
        assert lives.now.executions.last is None, "nothing was begun"
        with pytest.raises(ApiError, match="no migration is running"):
            lives.now.commands.preview_abort(rollback=False)
        back = lives.abort(1_000_000, SECONDS)
        assert back.rollback is not None
        assert back.rollback.rows_applied == preview.rollback.promotions + preview.rollback.demotions > 0
        assert back.rollback.bytes == preview.rollback.bytes
        with pytest.raises(ApiError, match="no migration is running"):
            lives.now.commands.preview_abort(rollback=True)


def test_a_preview_says_where_an_abort_would_stop_and_what_a_rollback_would_move(lives: Lives) -> None:
    with Ranks(lives.port, LAYOUT) as ranks:
        in_the_middle(lives, ranks)
        running = lives.now.executions.last
        assert running is not None
        with lives.gate.held():
            lives.now.start("p3", target(3))
            preview = lives.now.commands.preview_abort(rollback=False)
            back = lives.now.commands.preview_abort(rollback=True).rollback
            assert running.migration.state is MigrationState.PUSHING, "nothing was asked of it"
        assert (preview.migration.migration_id, preview.waiting, preview.rollback) == ("p2", ("p3",), None)
        assert (preview.migration.chunks_pushed, preview.rows_pushed) == (20, 200)
        assert back is not None
        assert back.to_version == running.migration.progress.base_version
