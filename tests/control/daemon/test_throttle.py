"""Limits of outstanding chunks, for any sequence of chunks and changes of the limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.control.daemon.journal import PlacementJournal, Segment
from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_states import MigrationState
from flexd.control.daemon.pusher import ChunkPusher
from flexd.control.daemon.throttle import BURST_SECONDS, PaceLimit, Throttle, ThrottleLimits, ThrottleReason
from flexd.core.errors import ControlError
from flexd.core.placement import Delta, Placement
from tests.support.ranks_in_threads import target


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def rows(*sizes: int) -> np.ndarray:
    return np.array(sizes, dtype=np.int64)


def test_without_limits_everything_goes_at_once() -> None:
    throttle = Throttle()
    assert throttle.release(rows(*[1 << 40] * 100), 1 << 60) == 100
    assert throttle.snapshot().waits_for is None


def test_a_step_limit_cuts_the_chunk_and_holds_the_next_until_the_first_is_applied() -> None:
    throttle = Throttle(ThrottleLimits(bytes_per_step=250))
    assert throttle.release(rows(100, 100, 100, 100), 0) == 2
    assert throttle.release(rows(100, 100), 200) == 0
    assert throttle.snapshot().waits_for is ThrottleReason.STEP
    assert throttle.release(rows(50, 100), 200) == 0, "what is cut by the limit is not cut further: two rows fit"
    assert throttle.release(rows(50), 200) == 1
    assert throttle.release(rows(100, 100), 0) == 2
    assert throttle.snapshot().waits_for is None
    assert throttle.snapshot().released_bytes == 450


def test_a_row_larger_than_the_limit_goes_by_itself() -> None:
    throttle = Throttle(ThrottleLimits(bytes_per_step=10, bytes_per_second=10), Clock())
    assert throttle.release(rows(1000, 1, 1), 0) == 1
    assert throttle.release(rows(1000), 1000) == 0


def test_rows_that_only_drop_copies_wait_for_nothing() -> None:
    throttle = Throttle(ThrottleLimits(bytes_per_step=10, bytes_per_second=1), Clock())
    assert throttle.release(rows(0, 0, 0), 1 << 30, settled=False) == 3


def test_a_step_limit_waits_for_chunks_of_an_earlier_daemon() -> None:
    throttle = Throttle(ThrottleLimits(bytes_per_step=1000))
    assert throttle.release(rows(10), 0, settled=False) == 0
    assert throttle.release(rows(10), 0, settled=True) == 1
    assert Throttle(ThrottleLimits(bytes_per_second=1000)).release(rows(10), 0, settled=False) == 1


def test_a_pace_can_only_lower_the_limit_and_a_pause_holds_all() -> None:
    throttle = Throttle(ThrottleLimits(bytes_per_step=100))
    throttle.set_pace(PaceLimit(bytes_per_step=40))
    assert throttle.bytes_per_step == 40
    throttle.set_pace(PaceLimit(bytes_per_step=4000))
    assert throttle.bytes_per_step == 100
    throttle.set_pace(PaceLimit(bytes_per_step=40, paused=True))
    assert throttle.release(rows(0), 0) == 0
    assert throttle.snapshot().waits_for is ThrottleReason.PAUSE


@pytest.mark.parametrize("limits", [{"bytes_per_step": 0}, {"bytes_per_second": 0}, {"bytes_per_second": -5}])
def test_a_limit_of_nothing_is_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ControlError, match="at least 1"):
        ThrottleLimits(**limits)


def test_waiting_is_accounted_by_cause() -> None:
    clock = Clock()
    throttle = Throttle(ThrottleLimits(bytes_per_step=10), clock)
    throttle.release(rows(10), 10)
    clock.now += 0.5
    throttle.release(rows(10), 10)
    clock.now += 0.25
    throttle.release(rows(10), 0)
    clock.now += 0.75
    throttle.idle()
    waited = throttle.snapshot().waiting_seconds
    assert waited == {ThrottleReason.STEP: pytest.approx(0.75), ThrottleReason.SECOND: 0.0, ThrottleReason.PAUSE: 0.0}


@settings(max_examples=60, deadline=None)
@given(
    rate=st.integers(1, 10_000),
    requests=st.lists(st.tuples(st.floats(0, 3), st.lists(st.integers(0, 5_000), min_size=1, max_size=8)), max_size=40),
)
def test_no_stretch_of_time_lets_more_through_than_rate_and_burst(
    rate: int, requests: list[tuple[float, list[int]]]
) -> None:
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


def test_a_rate_is_reached() -> None:
    clock = Clock()
    throttle = Throttle(ThrottleLimits(bytes_per_second=1_000), clock)
    sent = 0
    for _ in range(500):
        clock.now += 0.02
        sent += 10 * throttle.release(rows(*[10] * 50), 0)
    assert sent == pytest.approx(10 * 1_000, rel=0.12)


def test_a_chunk_as_large_as_the_limit_goes_whole() -> None:
    assert Throttle(ThrottleLimits(bytes_per_step=200)).release(rows(100, 100, 1), 0) == 2


def test_a_change_of_the_rate_pays_for_what_went_before_and_gives_no_second_burst() -> None:
    clock = Clock()
    throttle = Throttle(ThrottleLimits(bytes_per_second=1_000), clock)
    assert throttle.release(rows(1_000), 0) == 1, "the burst is spent"
    throttle.set_limits(ThrottleLimits(bytes_per_second=1_000))
    assert throttle.release(rows(1_000), 0) == 0
    clock.now += 0.5
    throttle.set_limits(ThrottleLimits(bytes_per_second=10))
    assert throttle.release(rows(10), 0) == 1, "the half second before the change counts at the old rate"
    throttle.set_limits(ThrottleLimits(bytes_per_second=1_000))
    assert throttle.release(rows(400), 0) == 0, "what the smaller bucket did not hold is gone"


def test_a_rate_where_there_was_none_begins_with_a_full_bucket() -> None:
    throttle = Throttle(ThrottleLimits(), Clock())
    throttle.release(rows(1 << 40), 0)
    throttle.set_limits(ThrottleLimits(bytes_per_second=1_000))
    assert throttle.release(rows(1_000), 0) == 1
    assert throttle.release(rows(1), 0) == 0


def test_time_without_anything_to_let_go_is_no_waiting_and_a_silence_counts_for_little() -> None:
    clock = Clock()
    throttle = Throttle(ThrottleLimits(bytes_per_step=10), clock)
    throttle.release(rows(10), 10)
    clock.now += 0.25
    throttle.idle()
    clock.now += 0.5
    throttle.release(rows(10), 10)
    clock.now += 60.0
    throttle.release(rows(10), 0)
    assert throttle.snapshot().waiting_seconds[ThrottleReason.STEP] == pytest.approx(0.25 + 1.0)


@dataclass
class Pushed:
    """A pusher over a journal, with ranks that apply what is agreed, some of it at a time."""

    directory: Path
    throttle: Throttle
    steps: list[int] = field(default_factory=list)
    """Bytes applied at each step."""

    def __post_init__(self) -> None:
        self.journal = PlacementJournal(self.directory)
        self.journal.begin(Segment("a1", 1, "t"), Placement.empty())
        self.pusher = ChunkPusher(self.journal, 4, 1_000, self.throttle, self.row_bytes)
        self.pusher.begin_epoch(0, 0)
        self.applied = 0
        self.held: dict[int, int] = {}

    @staticmethod
    def row_bytes(delta: Delta) -> np.ndarray:
        return np.where(delta.new_tiers > delta.old_tiers, 64, 0).astype(np.int64)

    def push(self) -> None:
        while (chunk := self.pusher.next_chunk(1)) is not None:
            self.held[chunk.version] = int(self.row_bytes(chunk.delta).sum())

    def step(self) -> None:
        """Every rank applies all it holds: as much as one step may do at most."""
        self.steps.append(sum(self.held.values()))
        self.applied = max(self.held, default=self.applied)
        self.held.clear()
        self.pusher.acknowledge(self.applied, self.applied)


@settings(max_examples=25, deadline=None)
@given(
    caps=st.lists(st.integers(1, 2_000), min_size=1, max_size=6),
    epochs=st.sets(st.integers(0, 40), max_size=4),
    data=st.data(),
)
def test_no_step_applies_more_than_the_cap_and_all_arrives(
    tmp_path_factory: pytest.TempPathFactory, caps: list[int], epochs: set[int], data: st.DataObject
) -> None:
    it = Pushed(tmp_path_factory.mktemp("journal"), Throttle(ThrottleLimits(bytes_per_step=caps[0])))
    migration = Migration("p", lambda p: p.delta_to(target(1, 300)).chunks(40))
    it.pusher.submit(migration)
    in_force = caps[0]
    for turn in range(4_000):
        if turn and turn < len(caps):
            # What is on its way was let go under the older limit.
            it.push()
            it.step()
            in_force = caps[turn]
            it.throttle.set_limits(ThrottleLimits(bytes_per_step=in_force))
        it.push()
        if turn in epochs:
            # The ranks hold, and have agreed on, only some of what was pushed.
            agreed = data.draw(st.integers(it.applied, it.pusher.version))
            it.held = {version: size for version, size in it.held.items() if version <= agreed}
            it.pusher.begin_epoch(agreed, it.journal.placement_at(agreed).digest())
            it.pusher.acknowledge(agreed, it.applied)
            it.push()
        it.step()
        assert it.steps[-1] <= max(in_force, 64)
        if migration.done:
            break
        it.push()
    assert migration.state is MigrationState.COMMITTED
    assert it.journal.placement_at(it.pusher.version).digest() == target(1, 300).digest()


def test_a_held_migration_is_superseded_all_the_same(tmp_path: Path) -> None:
    it = Pushed(tmp_path, Throttle())
    it.throttle.set_pace(PaceLimit(paused=True))
    first = Migration("p", lambda p: p.delta_to(target(1, 30)).chunks(10))
    it.pusher.submit(first)
    it.push()
    assert (first.state, it.pusher.version) == (MigrationState.PUSHING, 0)
    second = Migration("q", lambda p: p.delta_to(target(2, 30)).chunks(10))
    it.pusher.submit(second)
    it.push()
    assert first.state is MigrationState.SUPERSEDED
    it.throttle.set_pace(PaceLimit())
    it.push()
    it.step()
    it.push()
    assert second.state is MigrationState.COMMITTED
    assert it.journal.placement_at(it.pusher.version).digest() == target(2, 30).digest(), "nothing of the first is left"


def test_a_restarted_daemon_waits_until_the_ranks_have_applied_what_they_had_agreed_on(tmp_path: Path) -> None:
    it = Pushed(tmp_path, Throttle(ThrottleLimits(bytes_per_step=1 << 30)))
    for version, delta in enumerate(Placement.empty().delta_to(target(1, 30)).chunks(10), start=1):
        it.journal.append(version, delta)
    it.pusher.begin_epoch(3, target(1, 30).digest())
    it.pusher.submit(Migration("p", lambda p: p.delta_to(target(2, 30)).chunks(60)))
    it.pusher.acknowledge(3, 2)
    assert it.pusher.next_chunk(1) is None, "the third chunk may be applied at the next step: nothing beside it"
    assert it.throttle.snapshot().waits_for is ThrottleReason.STEP
    it.pusher.acknowledge(3, 3)
    assert it.pusher.next_chunk(1) is not None
