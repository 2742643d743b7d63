"""Numbering and voiding of chunks and ends of migrations, without network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flexd.control.daemon.journal import PlacementJournal, Segment
from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_record import MigrationRecord, MigrationState, TransitionEvent
from flexd.control.daemon.pusher import ChunkLimits, ChunkPusher
from flexd.control.daemon.throttle import Throttle
from flexd.core.errors import ControlError, IllegalTransitionError
from flexd.core.placement import Placement, RankLayout
from tests.support.ranks_in_threads import TABLES, target, topology_of

TOPOLOGY = topology_of(RankLayout(2, 2))


def planned(name: str, to: Placement) -> Migration:
    return Migration(MigrationRecord(migration_id=name, plan_id=name), to)


class PusherHarness:
    """A pusher with a journal, as after ``begin_epoch`` at version 0."""

    def __init__(self, directory: Path, window: int = 3, rows: int = 10, throttle: Throttle | None = None) -> None:
        self.journal = PlacementJournal(directory)
        self.journal.begin(Segment("a1", 1, "t"), Placement.empty())
        self.pusher = ChunkPusher(self.journal, TABLES, ChunkLimits(window, rows, 2**30), throttle)
        self.begin_epoch(0)

    def begin_epoch(self, version: int) -> None:
        self.pusher.begin_epoch(version, self.journal.placement_at(version).digest(), TOPOLOGY)

    def push_all(self) -> list[int]:
        versions = []
        while (chunk := self.pusher.next_chunk(1)) is not None:
            # A chunk is durable before it is sent.
            assert self.journal.last_version == chunk.version
            versions.append(chunk.version)
        return versions


def test_chunks_are_numbered_journalled_and_bounded(tmp_path: Path) -> None:
    harness = PusherHarness(tmp_path)
    migration = planned("p", target(1, 50))
    harness.pusher.submit(migration)
    assert harness.push_all() == [1, 2, 3]
    harness.pusher.acknowledge(3, 0)
    assert harness.push_all() == []
    harness.pusher.acknowledge(3, 2)
    assert harness.push_all() == [4, 5]
    assert migration.state is MigrationState.APPLYING
    harness.pusher.acknowledge(5, 5)
    harness.push_all()
    assert migration.state is MigrationState.COMMITTED
    assert harness.pusher.digest_at(5) == target(1, 50).digest()
    events = harness.pusher.drain_events()
    assert [each.transition.after if each.transition else None for each in events] == [
        MigrationState.PENDING,
        MigrationState.PUSHING,
        MigrationState.APPLYING,
        MigrationState.COMMITTED,
        None,
    ]


@pytest.mark.parametrize("agreed", range(4))
def test_an_ended_epoch_voids_unagreed_chunks(tmp_path: Path, agreed: int) -> None:
    harness = PusherHarness(tmp_path)
    migration = planned("p", target(1, 30))
    harness.pusher.submit(migration)
    assert harness.push_all() == [1, 2, 3]
    assert migration.delta is not None
    chunks = list(migration.delta.chunks(10))
    harness.begin_epoch(agreed)
    assert migration.state is MigrationState.PUSHING or agreed == 3
    assert migration.record.chunks_pushed == agreed
    assert migration.record.rows_agreed == 10 * agreed
    harness.pusher.acknowledge(agreed, agreed)
    assert harness.push_all() == list(range(agreed + 1, 4))
    # The order is that of the plan: every version has the placement of the plan, not only the last.
    for version in range(4):
        expected = Placement.empty()
        for chunk in chunks[:version]:
            expected = expected.apply(chunk)
        assert harness.journal.placement_at(version).digest() == expected.digest()
    harness.pusher.acknowledge(3, 3)
    harness.push_all()
    assert migration.state is MigrationState.COMMITTED
    assert harness.journal.placement_at(3).digest() == target(1, 30).digest()


def test_a_completely_pushed_migration_returns_to_pushing_when_chunks_are_void(tmp_path: Path) -> None:
    harness = PusherHarness(tmp_path, window=4)
    migration = planned("p", target(1, 30))
    harness.pusher.submit(migration)
    harness.push_all()
    assert migration.state is MigrationState.APPLYING
    harness.begin_epoch(1)
    assert migration.state is MigrationState.PUSHING
    newer = planned("q", target(2, 30))
    harness.pusher.limits = replace(harness.pusher.limits, rows=100)
    harness.pusher.submit(newer)
    harness.pusher.acknowledge(1, 1)
    assert harness.push_all() == [2]
    assert migration.state is MigrationState.SUPERSEDED
    assert harness.journal.placement_at(2).digest() == target(2, 30).digest()


def test_an_illegal_transition_is_counted_and_the_next_migration_runs(tmp_path: Path) -> None:
    harness = PusherHarness(tmp_path)
    broken = planned("p", target(1, 30))
    harness.pusher.submit(broken)
    harness.pusher.next_chunk(1)
    # Another component ends the migration.
    broken.fire(TransitionEvent.FAIL, "ended elsewhere")
    with pytest.raises(IllegalTransitionError, match="no fail in state failed"):
        harness.pusher.fail_active("refused")
    assert harness.pusher.illegal_transitions == 1
    harness.pusher.acknowledge(1, 1)
    newer = planned("q", target(2, 30))
    harness.pusher.limits = replace(harness.pusher.limits, rows=100)
    harness.pusher.submit(newer)
    assert harness.push_all() == [2]
    harness.pusher.acknowledge(2, 2)
    harness.push_all()
    assert newer.state is MigrationState.COMMITTED


def test_an_abort_waits_for_pushed_chunks_and_pushes_no_more(tmp_path: Path) -> None:
    harness = PusherHarness(tmp_path, window=2)
    migration = planned("p", target(1, 50))
    newer = planned("q", target(2, 30))
    harness.pusher.submit(migration)
    assert harness.push_all() == [1, 2]
    migration.abort("enough")
    harness.pusher.submit(newer)
    assert harness.push_all() == []
    assert (migration.state, newer.state) == (MigrationState.ABORTING, MigrationState.PENDING)
    harness.pusher.acknowledge(2, 1)
    assert harness.push_all() == []
    assert migration.state is MigrationState.ABORTING
    harness.pusher.acknowledge(2, 2)
    harness.pusher.limits = replace(harness.pusher.limits, rows=100)
    assert harness.push_all() == [3]
    assert migration.state is MigrationState.ABORTED
    assert "stopped at version 2, 20 of 50 rows applied" in migration.record.problem
    assert harness.journal.placement_at(3).digest() == target(2, 30).digest()


@pytest.mark.parametrize("agreed", range(3))
def test_void_chunks_of_an_aborted_migration_are_not_pushed_again(tmp_path: Path, agreed: int) -> None:
    harness = PusherHarness(tmp_path, window=2)
    migration = planned("p", target(1, 50))
    harness.pusher.submit(migration)
    assert harness.push_all() == [1, 2]
    migration.abort("enough")
    harness.pusher.end_early()
    assert migration.state is MigrationState.ABORTING
    harness.begin_epoch(agreed)
    harness.pusher.acknowledge(agreed, agreed)
    assert harness.push_all() == []
    assert migration.state is MigrationState.ABORTED
    progress = migration.record
    assert (progress.rows_pushed, progress.rows_applied, progress.last_version) == (10 * agreed, 10 * agreed, agreed)
    assert f"stopped at version {agreed}, {10 * agreed} of 50 rows applied" in migration.record.problem
    assert harness.pusher.drain_events()[-1].transition is None


def test_no_migration_is_left_waiting_by_a_stop(tmp_path: Path) -> None:
    harness = PusherHarness(tmp_path)
    running, waiting = planned("p", target(1, 50)), planned("q", target(2, 50))
    harness.pusher.submit(running)
    assert harness.push_all() == [1, 2, 3]
    harness.pusher.submit(waiting)
    harness.pusher.stop("the daemon is stopping")
    assert (running.state, waiting.state) == (MigrationState.FAILED, MigrationState.FAILED)
    late = planned("r", target(3, 50))
    with pytest.raises(ControlError, match="the daemon is stopping"):
        harness.pusher.submit(late)
