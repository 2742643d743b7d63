"""Numbering, voiding and ending of chunks, without network."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexd.control.daemon.journal import PlacementJournal, Segment
from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_states import MigrationState, TransitionEvent
from flexd.control.daemon.pusher import ChunkPusher
from flexd.core.errors import IllegalTransitionError
from flexd.core.placement import Placement
from tests.support.ranks_in_threads import target


class Pushed:
    """A pusher with a journal, as after ``begin_epoch`` at version 0."""

    def __init__(self, directory: Path, window: int = 3) -> None:
        self.journal = PlacementJournal(directory)
        self.journal.begin(Segment("a1", 1, "t"), Placement.empty())
        self.pusher = ChunkPusher(self.journal, window, 1000)
        self.pusher.begin_epoch(0, 0)

    def push_all(self) -> list[int]:
        versions = []
        while (chunk := self.pusher.next_chunk(1)) is not None:
            # Durable before it is anywhere else.
            assert self.journal.last_version == chunk.version
            versions.append(chunk.version)
        return versions


def test_chunks_are_numbered_journalled_and_bounded(tmp_path: Path) -> None:
    it = Pushed(tmp_path)
    migration = Migration("p", lambda p: p.delta_to(target(1, 50)).chunks(10))
    it.pusher.submit(migration)
    assert it.push_all() == [1, 2, 3]
    it.pusher.acknowledge(3, 0)
    assert it.push_all() == []
    it.pusher.acknowledge(3, 2)
    assert it.push_all() == [4, 5]
    assert migration.state is MigrationState.PUSHING
    it.pusher.acknowledge(5, 4)
    assert it.push_all() == []
    assert migration.state is MigrationState.APPLYING
    it.pusher.acknowledge(5, 5)
    it.push_all()
    assert migration.state is MigrationState.COMMITTED
    assert it.pusher.digest_at(5) == target(1, 50).digest()
    news = it.pusher.drain_events()
    assert [each.transition.after if each.transition else None for each in news] == [
        MigrationState.PENDING,
        MigrationState.PUSHING,
        MigrationState.APPLYING,
        MigrationState.COMMITTED,
        None,
    ]


@pytest.mark.parametrize("agreed", range(4))
def test_an_epoch_that_ends_voids_what_was_not_agreed(tmp_path: Path, agreed: int) -> None:
    it = Pushed(tmp_path)
    migration = Migration("p", lambda p: p.delta_to(target(1, 30)).chunks(10))
    it.pusher.submit(migration)
    assert it.push_all() == [1, 2, 3]
    assert migration.state is MigrationState.PUSHING
    it.pusher.begin_epoch(agreed, it.journal.placement_at(agreed).digest())
    assert migration.progress.chunks_pushed == agreed
    assert migration.progress.chunks_agreed == agreed
    it.pusher.acknowledge(agreed, agreed)
    assert it.push_all() == list(range(agreed + 1, 4))
    # In the order of the plan, not only the same rows in the end.
    chunks = list(Placement.empty().delta_to(target(1, 30)).chunks(10))
    for version in range(4):
        expected = Placement.empty()
        for chunk in chunks[:version]:
            expected = expected.apply(chunk)
        assert it.journal.placement_at(version).digest() == expected.digest()
    it.pusher.acknowledge(3, 3)
    it.push_all()
    assert migration.state is MigrationState.COMMITTED
    assert it.journal.placement_at(3).digest() == target(1, 30).digest()


def test_a_pushed_out_migration_goes_back_to_pushing(tmp_path: Path) -> None:
    it = Pushed(tmp_path, window=4)
    migration = Migration("p", lambda p: p.delta_to(target(1, 30)).chunks(10))
    it.pusher.submit(migration)
    it.push_all()
    assert migration.state is MigrationState.APPLYING
    it.pusher.begin_epoch(1, it.journal.placement_at(1).digest())
    assert migration.state is MigrationState.PUSHING
    newer = Migration("q", lambda p: p.delta_to(target(2, 30)).chunks(100))
    it.pusher.submit(newer)
    it.pusher.acknowledge(1, 1)
    assert it.push_all() == [2]
    assert migration.state is MigrationState.SUPERSEDED
    assert it.journal.placement_at(2).digest() == target(2, 30).digest()


def test_the_next_migration_starts_from_what_is_sure_to_be_applied(tmp_path: Path) -> None:
    it = Pushed(tmp_path, window=2)
    older = Migration("p", lambda p: p.delta_to(target(1, 30)).chunks(10))
    newer = Migration("q", lambda p: p.delta_to(target(2, 30)).chunks(100))
    it.pusher.submit(older)
    assert it.push_all() == [1, 2]
    it.pusher.submit(newer)
    assert it.push_all() == []
    assert (older.state, newer.state) == (MigrationState.SUPERSEDED, MigrationState.PENDING)
    it.pusher.acknowledge(1, 1)
    assert it.push_all() == []
    it.pusher.begin_epoch(1, it.journal.placement_at(1).digest())
    assert it.push_all() == [2]
    assert it.journal.placement_at(2).digest() == target(2, 30).digest()


def test_an_illegal_transition_is_counted_and_the_next_migration_runs(tmp_path: Path) -> None:
    it = Pushed(tmp_path)
    broken = Migration("p", lambda p: p.delta_to(target(1, 30)).chunks(10))
    it.pusher.submit(broken)
    it.pusher.next_chunk(1)
    # Somebody else has moved it on.
    broken.fire(TransitionEvent.FAIL, "behind the pusher's back")
    with pytest.raises(IllegalTransitionError, match="no fail in state failed"):
        it.pusher.fail_active("refused")
    assert it.pusher.illegal_transitions == 1
    it.pusher.acknowledge(1, 1)
    newer = Migration("q", lambda p: p.delta_to(target(2, 30)).chunks(100))
    it.pusher.submit(newer)
    assert it.push_all() == [2]
    it.pusher.acknowledge(2, 2)
    it.push_all()
    assert newer.state is MigrationState.COMMITTED


def test_an_abort_waits_for_the_chunks_on_their_way_and_pushes_none(tmp_path: Path) -> None:
    it = Pushed(tmp_path, window=2)
    migration = Migration("p", lambda p: p.delta_to(target(1, 50)).chunks(10))
    newer = Migration("q", lambda p: p.delta_to(target(2, 30)).chunks(100))
    it.pusher.submit(migration)
    assert it.push_all() == [1, 2]
    migration.abort("enough")
    it.pusher.submit(newer)
    assert it.push_all() == []
    assert (migration.state, newer.state) == (MigrationState.ABORTING, MigrationState.PENDING)
    it.pusher.acknowledge(2, 1)
    assert it.push_all() == []
    assert migration.state is MigrationState.ABORTING
    it.pusher.acknowledge(2, 2)
    assert it.push_all() == [3]
    assert migration.state is MigrationState.ABORTED
    assert "stopped at version 2, 20 rows applied" in migration.reason
    assert it.journal.placement_at(3).digest() == target(2, 30).digest()


@pytest.mark.parametrize("agreed", range(3))
def test_chunks_of_an_aborted_migration_that_are_void_are_not_pushed_again(tmp_path: Path, agreed: int) -> None:
    it = Pushed(tmp_path, window=2)
    migration = Migration("p", list(Placement.empty().delta_to(target(1, 50)).chunks(10)))
    it.pusher.submit(migration)
    assert it.push_all() == [1, 2]
    migration.abort("enough")
    it.pusher.end_early()
    assert migration.state is MigrationState.ABORTING
    it.pusher.begin_epoch(agreed, it.journal.placement_at(agreed).digest())
    it.pusher.acknowledge(agreed, agreed)
    assert it.push_all() == []
    assert migration.state is MigrationState.ABORTED
    progress = migration.progress
    assert (progress.rows_pushed, progress.rows_applied, progress.last_version) == (10 * agreed, 10 * agreed, agreed)
    assert f"stopped at version {agreed}, {10 * agreed} of 50 rows applied" in migration.reason
    assert it.pusher.drain_events()[-1].transition is None


def test_figures_are_final_when_the_last_chunk_is(tmp_path: Path) -> None:
    it = Pushed(tmp_path, window=3)
    older = Migration("p", lambda p: p.delta_to(target(1, 50)).chunks(10))
    it.pusher.submit(older)
    assert it.push_all() == [1, 2, 3]
    it.pusher.submit(Migration("q", []))
    it.push_all()
    assert older.state is MigrationState.SUPERSEDED
    assert not [news for news in it.pusher.drain_events() if news.transition is None]
    it.pusher.acknowledge(3, 2)
    assert it.pusher.drain_events() == []
    it.pusher.acknowledge(3, 3)
    (settled,) = it.pusher.drain_events()
    assert (settled.migration, settled.transition, older.progress.rows_applied) == (older, None, 30)
    it.pusher.stop("the end")
    assert not [news for news in it.pusher.drain_events() if news.migration is older]
