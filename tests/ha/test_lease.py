"""No two processes hold the lease at one moment, with failing and slow calls and clocks of other offset and rate."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flexd.core.errors import LeaseError
from flexd.ha import lease as lease_module
from flexd.ha.lease import CLOCK_MARGIN, Lease, boot_seconds
from flexd.ha.lease_store import MAX_TERM, LeaseRecord

DURATION = 10.0


@dataclass
class World:
    """The true time, and the one record."""

    now: float = 0.0
    record: LeaseRecord | None = None
    writes: int = 0


@dataclass
class Process:
    """The store of one process; a call may take time before and after its effect, and fail."""

    world: World
    name: str
    offset: float
    rate: float
    delays: list[float] = field(default_factory=list)
    failing: str = ""

    def __post_init__(self) -> None:
        self.starts = 0
        self.over: set[int] = set()
        """Terms that ended while a call was on its way."""
        self.restart()

    def restart(self) -> None:
        self.starts += 1
        self.lease = Lease(self, f"{self.name}-{self.starts}", DURATION, clock=self.clock)

    def clock(self) -> float:
        return self.offset + self.world.now * self.rate

    @property
    def location(self) -> str:
        return "here"

    def _pass(self) -> None:
        held = self.lease.term
        self.world.now += self.delays.pop() if self.delays else 0.0
        if held and not self.lease.holds(held):
            self.over.add(held)

    def read(self) -> LeaseRecord | None:
        self._pass()
        record = self.world.record
        self._pass()
        if self.failing == "read":
            raise LeaseError("no answer")
        return record

    def compare_and_set(self, seen: LeaseRecord | None, holder: str, term: int, duration: float) -> LeaseRecord | None:
        self._pass()
        if self.failing == "before":
            raise LeaseError("not sent")
        if self.world.record != seen:
            return None
        self.world.writes += 1
        written = LeaseRecord(holder, term, duration, str(self.world.writes))
        self.world.record = written
        self._pass()
        if self.failing == "after":
            raise LeaseError("the answer is lost")
        return written

    def close(self) -> None:
        pass


class LeaseMachine(RuleBasedStateMachine):
    """Three processes; only rules advance the true time."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.processes = [
            Process(self.world, "a", 5.0, 1.0),
            Process(self.world, "b", 80_000.0, 1.01),
            Process(self.world, "c", 0.5, 0.99),
        ]
        self.holder_of: dict[int, str] = {}
        self.highest = 0
        self.ended: set[int] = set()

    @rule(
        who=st.integers(0, 2),
        delays=st.lists(st.sampled_from([0.0, 0.1, 3.0, 9.0, 15.0]), max_size=4),
        failing=st.sampled_from(["", "", "", "read", "before", "after"]),
    )
    def attempt(self, who: int, delays: list[float], failing: str) -> None:
        process = self.processes[who]
        process.delays, process.failing = delays, failing
        before = process.lease.term
        try:
            held = process.lease.acquire_or_renew()
        except LeaseError:
            held = process.lease.term > 0
        term = process.lease.term
        assert held == (term > 0)
        assert term not in process.over, "an ended term is never held again"
        if term and term != before:
            assert term > self.highest, "terms only grow"
            self.highest = term
            assert term not in self.holder_of
        if term:
            assert self.holder_of.setdefault(term, process.lease.identity) == process.lease.identity

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0, 9.6, 10.2, 30.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(who=st.integers(0, 2))
    def restart(self, who: int) -> None:
        self.processes[who].restart()

    @rule(who=st.integers(0, 2), failing=st.sampled_from(["", "before", "after"]))
    def release(self, who: int, failing: str) -> None:
        process = self.processes[who]
        process.delays, process.failing = [], failing
        with contextlib.suppress(LeaseError):
            process.lease.release()
        assert process.lease.term == 0

    @invariant()
    def one_holder(self) -> None:
        held = {process.lease.term for process in self.processes} - {0}
        assert len(held) <= 1
        assert not held & self.ended, "an ended term is never held again"
        self.ended |= set(self.holder_of) - held


LeaseMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_machine = LeaseMachine.TestCase


def test_a_renewal_slower_than_the_lease_does_not_hold() -> None:
    world = World()
    process = Process(world, "a", 0.0, 1.0)
    assert process.lease.acquire_or_renew()
    process.delays = [12.0, 0.0]
    assert not process.lease.acquire_or_renew()
    assert process.lease.term == 0


@pytest.mark.parametrize("observed", [True, False])
def test_a_renewal_that_answers_after_expiry_does_not_revive_the_standing(observed: bool) -> None:
    """Whether or not another thread has seen in between that the lease was over."""
    world = World()
    process = Process(world, "a", 0.0, 1.0)
    assert process.lease.acquire_or_renew()
    world.now = 9.0
    answer = process.compare_and_set

    def answer_late(*arguments: Any) -> LeaseRecord | None:
        written = answer(*arguments)
        world.now = 12.0
        if observed:
            assert not process.lease.holds(1)
        return written

    process.compare_and_set = answer_late  # type: ignore[method-assign]
    assert not process.lease.acquire_or_renew(), "by its sending time it would be valid until 18.5"
    assert not process.lease.holds(1)
    del process.compare_and_set  # type: ignore[method-assign]
    assert process.lease.acquire_or_renew()
    assert (process.lease.holds(1), process.lease.holds(2)) == (False, True)


def test_an_expiry_that_was_seen_is_final_even_if_the_clock_goes_back() -> None:
    world = World()
    process = Process(world, "a", 0.0, 1.0)
    assert process.lease.acquire_or_renew()
    world.now = 10.0
    assert not process.lease.holds(1)
    world.now = 9.0
    assert not process.lease.holds(1)


def test_a_repeated_renewal_that_answers_after_expiry_does_not_revive_the_standing() -> None:
    """The renewal after a lost answer: it reads the record first and then writes again."""
    world = World()
    process = Process(world, "a", 0.0, 1.0)
    assert process.lease.acquire_or_renew()
    world.now, process.failing = 3.0, "after"
    with pytest.raises(LeaseError):
        process.lease.acquire_or_renew()
    world.now, process.failing = 9.0, ""
    process.delays = [3.0, 0.0, 0.0, 0.0]  # Taken from the end: the refused write, the read, the second write.
    assert not process.lease.acquire_or_renew()
    assert process.lease.term == 0


def test_a_lost_answer_to_a_renewal_does_not_lose_the_lease() -> None:
    world = World()
    process = Process(world, "a", 0.0, 1.0)
    assert process.lease.acquire_or_renew()
    world.now += 3
    process.failing = "after"
    with pytest.raises(LeaseError):
        process.lease.acquire_or_renew()
    assert process.lease.term == 1
    world.now += 3
    process.failing = ""
    assert process.lease.acquire_or_renew()
    assert process.lease.term == 1


def test_a_late_holder_acquires_the_lease_again_at_once() -> None:
    world = World()
    process = Process(world, "a", 0.0, 1.0)
    assert process.lease.acquire_or_renew()
    world.now = DURATION * (1 - CLOCK_MARGIN)
    assert process.lease.term == 0, "it ends at that moment"
    assert process.lease.acquire_or_renew()
    assert process.lease.holds(2)


def test_a_lost_answer_to_an_acquisition_skips_a_term() -> None:
    process = Process(World(), "a", 0.0, 1.0, failing="after")
    with pytest.raises(LeaseError):
        process.lease.acquire_or_renew()
    assert process.lease.term == 0, "the outcome of the write is unknown"
    process.failing = ""
    assert process.lease.acquire_or_renew()
    assert process.lease.holds(2)


def test_an_old_term_is_not_held_again_by_the_same_process() -> None:
    world = World()
    process = Process(world, "a", 0.0, 1.0)
    assert process.lease.acquire_or_renew()
    assert process.lease.holds(1)
    world.now += 20
    assert not process.lease.holds(1)
    assert process.lease.acquire_or_renew()
    assert not process.lease.holds(1)
    assert process.lease.holds(2)
    assert not process.lease.holds(0)


def test_a_lease_is_acquired_only_after_its_holder_has_lost_it() -> None:
    """The holder's clock runs 4 % slow, within the margin."""
    world = World()
    holder, other = Process(world, "a", 0.0, 0.96), Process(world, "b", 0.0, 1.0)
    assert holder.lease.acquire_or_renew()
    assert not other.lease.acquire_or_renew()
    world.now = DURATION - 0.1
    assert not other.lease.acquire_or_renew()
    world.now = DURATION
    assert other.lease.acquire_or_renew()
    assert holder.lease.term == 0


def test_a_stand_by_waits_from_the_end_of_a_slow_read() -> None:
    """The record may have been written at any moment of the read, from which on its holder counts its lease."""
    world = World()
    holder, other = Process(world, "a", 0.0, 1.0), Process(world, "b", 0.0, 1.0)

    def read_slowly() -> LeaseRecord | None:
        world.now += 9.0
        assert holder.lease.acquire_or_renew()
        return world.record

    other.read = read_slowly  # type: ignore[method-assign]
    assert not other.lease.acquire_or_renew()
    del other.read  # type: ignore[method-assign]
    world.now = 12.0
    assert holder.lease.holds(1)
    assert not other.lease.acquire_or_renew()
    world.now = 9.0 + DURATION
    assert other.lease.acquire_or_renew()


@pytest.mark.parametrize(("mine", "theirs"), [(5.0, 20.0), (20.0, 5.0)])
def test_a_stand_by_waits_for_the_longer_of_two_durations(mine: float, theirs: float) -> None:
    world = World()
    holder, other = Process(world, "a", 0.0, 1.0), Process(world, "b", 0.0, 1.0)
    assert Lease(holder, "a", theirs, clock=holder.clock).acquire_or_renew()
    lease = Lease(other, "b", mine, clock=other.clock)
    assert not lease.acquire_or_renew()
    world.now = 19.9
    assert not lease.acquire_or_renew()
    world.now = 20.0
    assert lease.acquire_or_renew()


def test_terms_continue_from_the_highest_known_term() -> None:
    """The directories of terms are kept when a store is emptied."""
    process = Process(World(), "a", 0.0, 1.0)
    lease = Lease(process, "a", DURATION, highest_known_term=lambda: 41, clock=process.clock)
    assert not lease.holds(0), "term 0 is held by no process"
    assert lease.acquire_or_renew()
    assert lease.holds(42)


@pytest.mark.parametrize(("holder", "term"), [("b-2", 7), ("b-2", 1), ("a-1", 7), ("", 1)])
def test_a_holder_that_finds_another_record_has_lost_the_lease(holder: str, term: int) -> None:
    """A record of equal term is found in a store that was emptied meanwhile."""
    world = World()
    process = Process(world, "a", 0.0, 1.0)
    assert process.lease.acquire_or_renew()
    assert process.lease.identity == "a-1"
    world.record = LeaseRecord(holder, term, DURATION, "by hand")
    assert not process.lease.acquire_or_renew()
    assert process.lease.term == 0


def test_no_term_follows_the_highest_possible_one() -> None:
    world = World(record=LeaseRecord("", MAX_TERM, DURATION, "1"))
    process = Process(world, "a", 0.0, 1.0)
    with pytest.raises(LeaseError, match="no term is left"):
        process.lease.acquire_or_renew()
    assert world.writes == 0
    world.record = LeaseRecord("", MAX_TERM - 1, DURATION, "2")
    assert process.lease.acquire_or_renew()
    assert process.lease.holds(MAX_TERM)


def test_the_clock_includes_time_of_a_suspended_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock_gettime(clock: int) -> float:
        return {7: 500.0}[clock]

    clocks = SimpleNamespace(CLOCK_BOOTTIME=7, clock_gettime=clock_gettime, monotonic=lambda: 100.0)
    monkeypatch.setattr(lease_module, "time", clocks)
    assert boot_seconds() == 500.0
    del clocks.CLOCK_BOOTTIME
    assert boot_seconds() == 100.0, "a system without CLOCK_BOOTTIME"
