from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
from ranks_in_threads import target

from flexd.control.journal import PlacementJournal, Segment
from flexd.control.migration import Migration
from flexd.control.migration_states import FINAL_STATES, TRANSITIONS, MigrationEvent, MigrationState
from flexd.control.pusher import ChunkPusher
from flexd.errors import ControlError
from flexd.placement import Placement


@pytest.mark.parametrize(("state", "event"), list(itertools.product(MigrationState, MigrationEvent)))
def test_only_the_tables_transitions_are_possible(state: MigrationState, event: MigrationEvent) -> None:
    paths = {
        MigrationState.PENDING: [],
        MigrationState.PUSHING: [MigrationEvent.START],
        MigrationState.APPLYING: [MigrationEvent.START, MigrationEvent.EXHAUSTED],
        MigrationState.COMMITTED: [MigrationEvent.START, MigrationEvent.EXHAUSTED, MigrationEvent.APPLIED],
        MigrationState.SUPERSEDED: [MigrationEvent.SUPERSEDE],
        MigrationState.ABORTING: [MigrationEvent.START, MigrationEvent.ABORT],
        MigrationState.ABORTED: [MigrationEvent.ABORT],
        MigrationState.FAILED: [MigrationEvent.FAIL],
    }
    migration = Migration("p", [])
    for step in paths[state]:
        migration.fire(step)
    assert migration.state is state
    after = TRANSITIONS.get((state, event))
    if after is None:
        with pytest.raises(ControlError, match=f"no {event.value} in state {state.value}"):
            migration.fire(event)
        assert migration.state is state
    else:
        migration.fire(event, "why")
        assert (migration.state, migration.reason) == (after, "why")


def test_nothing_leaves_a_final_state() -> None:
    assert not [state for state, _ in TRANSITIONS if state in FINAL_STATES]


def test_wait_returns_at_the_end_or_at_the_deadline() -> None:
    migration = Migration("p", [])
    assert migration.wait(0.01) is MigrationState.PENDING
    threading.Timer(0.05, lambda: migration.fire(MigrationEvent.ABORT)).start()
    assert migration.wait(10) is MigrationState.ABORTED


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
    news = it.pusher.take_news()
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
