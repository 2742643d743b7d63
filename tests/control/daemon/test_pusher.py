"""Numbering and voiding of chunks and ends of migrations, without network."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.control.daemon.journal import Chunk, PlacementJournal, Segment
from flexd.control.daemon.migration import Migration, MigrationRecord, MigrationState, TransitionEvent
from flexd.control.daemon.pusher import (
    BURST_SECONDS,
    ChunkLimits,
    ChunkPusher,
    Throttle,
    ThrottleLimits,
    ThrottleReason,
)
from flexd.core.errors import ControlError, IllegalTransitionError
from flexd.core.placement import Placement, RankLayout
from flexd.planner.plan import moved_bytes
from tests.support.ranks_in_threads import TABLES, target, topology_of
from tests.support.until import Clock

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


def submitted(directory: Path, rows: int, window: int = 3) -> tuple[PusherHarness, Migration]:
    """Submit a migration of so many rows."""
    harness, migration = PusherHarness(directory, window), planned("p", target(1, rows))
    harness.pusher.submit(migration)
    return harness, migration


def test_chunks_are_numbered_journalled_and_bounded(tmp_path: Path) -> None:
    harness, migration = submitted(tmp_path, rows=50)
    assert harness.push_all() == [1, 2, 3]
    harness.pusher.acknowledge(3, 0)
    assert harness.push_all() == []
    harness.pusher.acknowledge(3, 2)
    assert harness.push_all() == [4, 5]
    assert migration.state is MigrationState.APPLYING
    harness.pusher.acknowledge(5, 5)
    harness.push_all()
    assert migration.state is MigrationState.COMMITTED
    assert harness.pusher.digests[5] == target(1, 50).digest()
    events = list(iter(harness.pusher.next_event, None))
    assert [each.transition.after if each.transition else None for each in events] == [
        MigrationState.PENDING,
        MigrationState.PUSHING,
        MigrationState.APPLYING,
        MigrationState.COMMITTED,
        None,
    ]


@pytest.mark.parametrize("agreed", range(4))
def test_an_ended_epoch_voids_unagreed_chunks(tmp_path: Path, agreed: int) -> None:
    harness, migration = submitted(tmp_path, rows=30)
    assert harness.push_all() == [1, 2, 3]
    chunks = list(migration.delta.chunks(10))
    harness.begin_epoch(agreed)
    assert migration.state is MigrationState.PUSHING or agreed == 3
    assert migration.record.chunks_pushed == agreed
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
    harness, migration = submitted(tmp_path, window=4, rows=30)
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
    harness, migration = submitted(tmp_path, window=2, rows=50)
    newer = planned("q", target(2, 30))
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
    harness, migration = submitted(tmp_path, window=2, rows=50)
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
    assert f"stopped at version {agreed}, {10 * agreed} of 50 rows applied" in progress.problem
    assert list(iter(harness.pusher.next_event, None))[-1].transition is None


def test_no_migration_is_left_waiting_by_a_stop(tmp_path: Path) -> None:
    harness = PusherHarness(tmp_path)
    running, waiting = planned("p", target(1, 50)), planned("q", target(2, 50))
    harness.pusher.submit(running)
    assert harness.push_all() == [1, 2, 3]
    harness.pusher.submit(waiting)
    harness.pusher.stop("the daemon is stopping")
    assert (running.state, waiting.state) == (MigrationState.FAILED, MigrationState.FAILED)
    with pytest.raises(ControlError, match="the daemon is stopping"):
        harness.pusher.submit(planned("r", target(3, 50)))


LARGEST_ROW = max(table.row_bytes + table.state_bytes for table in TABLES.tables)


def rows(*sizes: int) -> np.ndarray:
    return np.array(sizes, dtype=np.int64)


def test_a_step_limit_splits_the_chunk_and_holds_the_next_until_the_first_is_applied() -> None:
    throttle = Throttle(ThrottleLimits(bytes_per_step=250))
    assert throttle.release(rows(100, 100, 100, 100), 0) == 2
    assert throttle.release(rows(100, 100), 200) == 0
    assert throttle.waits_for is ThrottleReason.STEP
    assert throttle.release(rows(50, 100), 200) == 0, "a chunk that fits the limit is not split: both rows wait"
    assert throttle.release(rows(50), 200) == 1
    assert throttle.release(rows(100, 100), 0) == 2
    assert throttle.waits_for is None
    assert throttle.released_bytes == 450


@settings(max_examples=60, deadline=None)
@given(
    rate=st.integers(1, 10_000),
    requests=st.lists(st.tuples(st.floats(0, 3), st.lists(st.integers(0, 5_000), min_size=1, max_size=8)), max_size=40),
)
def test_no_interval_releases_more_than_rate_and_burst(rate: int, requests: list[tuple[float, list[int]]]) -> None:
    clock = Clock()
    throttle = Throttle(ThrottleLimits(bytes_per_second=rate), clock)
    released: list[tuple[float, int]] = []
    largest = 0
    for wait, sizes in requests:
        clock.now += wait
        count = throttle.release(rows(*sizes), 0)
        if count:
            released.append((clock.now, sum(sizes[:count])))
            largest = max(largest, *sizes[:count])
    for start in range(len(released)):
        for end in range(start, len(released)):
            seconds = released[end][0] - released[start][0]
            sent = sum(size for _, size in released[start : end + 1])
            assert sent <= rate * (seconds + BURST_SECONDS) + largest + 1


def test_a_rate_change_accounts_the_time_before_it_and_grants_no_second_burst() -> None:
    clock = Clock()
    throttle = Throttle(ThrottleLimits(bytes_per_second=1_000), clock)
    assert throttle.release(rows(1_000), 0) == 1, "the burst is spent"
    throttle.set_limits(ThrottleLimits(bytes_per_second=1_000))
    assert throttle.release(rows(1_000), 0) == 0
    clock.now += 0.5
    throttle.set_limits(ThrottleLimits(bytes_per_second=10))
    assert throttle.release(rows(10), 0) == 1, "the half second before the change counts at the old rate"
    throttle.set_limits(ThrottleLimits(bytes_per_second=1_000))
    assert throttle.release(rows(400), 0) == 0, "tokens above the smaller bucket are lost"


class ThrottledRanks(PusherHarness):
    """A pusher with a throttle, and ranks that apply agreed chunks.

    Attributes:
        steps: bytes applied at each step.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self.throttle = Throttle(ThrottleLimits(bytes_per_step=limit))
        super().__init__(directory, 4, 40, self.throttle)
        self.steps: list[int] = []
        self.applied = 0
        self.held: dict[int, int] = {}

    def push(self) -> None:
        while (chunk := self.pusher.next_chunk(1)) is not None:
            self.held[chunk.version] = int(moved_bytes(chunk.delta, TABLES, TOPOLOGY.layout).sum())

    def step(self) -> None:
        """Apply all held chunks on every rank, which is the most that one step may apply."""
        self.steps.append(sum(self.held.values()))
        self.applied = max(self.held, default=self.applied)
        self.held.clear()
        self.pusher.acknowledge(self.applied, self.applied)


@settings(max_examples=12, deadline=None)
@given(
    caps=st.lists(st.integers(1, 2_000), min_size=1, max_size=6),
    epochs=st.sets(st.integers(0, 40), max_size=4),
    data=st.data(),
)
def test_no_step_applies_more_than_the_cap_and_the_migration_completes(
    tmp_path_factory: pytest.TempPathFactory, caps: list[int], epochs: set[int], data: st.DataObject
) -> None:
    harness = ThrottledRanks(tmp_path_factory.mktemp("journal"), caps[0])
    migration = Migration(MigrationRecord(migration_id="p"), target(1, 300))
    harness.pusher.submit(migration)
    in_force = caps[0]
    for turn in range(4_000):
        if turn and turn < len(caps):
            # Chunks in the window were released under the older limit.
            harness.push()
            harness.step()
            in_force = caps[turn]
            harness.throttle.set_limits(ThrottleLimits(bytes_per_step=in_force))
        harness.push()
        if turn in epochs:
            # The ranks hold, and have agreed on, only some of the pushed chunks.
            agreed = data.draw(st.integers(harness.applied, harness.pusher.version))
            harness.held = {version: size for version, size in harness.held.items() if version <= agreed}
            harness.begin_epoch(agreed)
            harness.pusher.acknowledge(agreed, harness.applied)
            harness.push()
        harness.step()
        assert harness.steps[-1] <= max(in_force, LARGEST_ROW)
        if migration.done:
            break
        harness.push()
    assert migration.state is MigrationState.COMMITTED
    assert harness.journal.placement_at(harness.pusher.version).digest() == target(1, 300).digest()


def test_a_restarted_daemon_waits_until_the_ranks_have_applied_the_agreed_chunks(tmp_path: Path) -> None:
    harness = ThrottledRanks(tmp_path, 1 << 30)
    for version, delta in enumerate(Placement.empty().delta_to(target(1, 30)).chunks(10), start=1):
        harness.journal.append(Chunk(version, delta))
    harness.begin_epoch(3)
    harness.pusher.submit(Migration(MigrationRecord(migration_id="p"), target(2, 30)))
    harness.pusher.acknowledge(3, 2)
    assert harness.pusher.next_chunk(1) is None, "the third chunk may be applied at the next step"
    assert harness.throttle.waits_for is ThrottleReason.STEP
    harness.pusher.acknowledge(3, 3)
    assert harness.pusher.next_chunk(1) is not None
