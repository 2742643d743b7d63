"""The adaptive controller: bounded, converging, and recovering, whatever the steps do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.control.daemon.pace import PaceController, PaceSettings, PaceState, StepTimes, StepWindow
from flexd.core.errors import ControlError

SETTINGS = PaceSettings(tolerance=0.1, floor_bytes=1_000, ceiling_bytes=65_000, increase_bytes=4_000)
BASE = StepTimes(0.010, 0.012, 100)
FINE = StepTimes(0.0105, 0.0125, 20)
SLOW = StepTimes(0.0105, 0.014, 20)


def running() -> PaceController:
    controller = PaceController(SETTINGS)
    controller.update(0.0, measured=True)
    assert controller.state is PaceState.RUNNING
    return controller


def test_nothing_moves_before_there_is_a_baseline() -> None:
    controller = PaceController(SETTINGS)
    controller.judge(SLOW, BASE, 1.0)
    controller.update(100.0, measured=False)
    assert controller.state is PaceState.MEASURING
    controller.update(100.0, measured=True)
    assert controller.state is PaceState.RUNNING


def test_good_judgements_add_and_bad_ones_halve() -> None:
    controller = running()
    at_first = controller.bytes_per_step
    controller.judge(FINE, BASE, 1.0)
    assert controller.bytes_per_step == at_first + 4_000
    controller.judge(SLOW, BASE, 2.0)
    assert controller.bytes_per_step == (at_first + 4_000) // 2
    assert controller.reason == "slowed: p90 of a step is 14 ms, 1.17 times the 12 ms without"
    assert (controller.sped, controller.slowed, controller.pauses) == (1, 1, 0)


@pytest.mark.parametrize("slow", [StepTimes(0.0112, 0.0125, 9), StepTimes(0.0101, 0.0133, 9)])
def test_either_quantile_hurts(slow: StepTimes) -> None:
    assert slow.slower_than(BASE, 0.1)
    assert not slow.slower_than(BASE, 0.2)


def test_at_the_floor_it_pauses_ever_longer_and_says_why() -> None:
    controller = running()
    now = 0.0
    while controller.state is PaceState.RUNNING:
        controller.judge(SLOW, BASE, now)
    assert controller.bytes_per_step == SETTINGS.floor_bytes
    assert controller.reason.startswith("paused for 5 s, at the floor already: p90")
    pauses = []
    for _ in range(8):
        before = now
        while controller.state is PaceState.PAUSED:
            now += 0.25
            controller.update(now, measured=True)
        pauses.append(now - before)
        controller.judge(SLOW, BASE, now)
    assert pauses == [5, 10, 20, 40, 80, 80, 80, 80], "bounded: the migration still ends"
    now += 80
    controller.update(now, measured=True)
    controller.judge(FINE, BASE, now)
    while controller.state is PaceState.RUNNING:
        controller.judge(SLOW, BASE, now)
    assert "paused for 5 s" in controller.reason, "a good judgement forgives"


def test_a_pause_without_a_baseline_goes_on() -> None:
    controller = running()
    while controller.state is PaceState.RUNNING:
        controller.judge(SLOW, BASE, 0.0)
    controller.update(1_000.0, measured=False)
    assert controller.state is PaceState.PAUSED


def test_a_judgement_in_a_pause_changes_nothing() -> None:
    controller = running()
    while controller.state is PaceState.RUNNING:
        controller.judge(SLOW, BASE, 0.0)
    why = controller.reason
    for times in (SLOW, FINE):
        controller.judge(times, BASE, 4.0)
    assert (controller.bytes_per_step, controller.pauses, controller.reason) == (SETTINGS.floor_bytes, 1, why)
    controller.update(5.0, measured=True)
    assert controller.state is PaceState.RUNNING, "nor is the pause any longer"


def test_at_the_ceiling_there_is_nothing_to_speed_up() -> None:
    controller = running()
    while controller.bytes_per_step < SETTINGS.ceiling_bytes:
        controller.judge(FINE, BASE, 1.0)
    sped = controller.sped
    controller.judge(FINE, BASE, 2.0)
    assert controller.sped == sped


def test_just_as_slow_as_tolerated_is_fine() -> None:
    assert not StepTimes(1.25, 1.25, 9).slower_than(StepTimes(1.0, 1.0, 9), 0.25)


def test_other_pauses_hold_from_the_next_one_on() -> None:
    controller = running()
    controller.apply_settings(
        PaceSettings(0.1, 1_000, 65_000, 4_000, first_pause_seconds=20.0, longest_pause_seconds=30.0)
    )
    while controller.state is PaceState.RUNNING:
        controller.judge(SLOW, BASE, 0.0)
    assert controller.reason.startswith("paused for 20 s")
    controller.apply_settings(
        PaceSettings(0.1, 1_000, 65_000, 4_000, first_pause_seconds=2.0, longest_pause_seconds=3.0)
    )
    controller.update(20.0, measured=True)
    controller.judge(SLOW, BASE, 20.0)
    assert controller.reason.startswith("paused for 3 s")


@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("judge"), st.floats(1e-6, 1.0), st.floats(1e-6, 1.0)),
            st.tuples(st.just("look"), st.floats(0, 50), st.booleans()),
            st.tuples(st.just("adopt"), st.integers(1, 5_000), st.integers(5_000, 100_000)),
            st.tuples(st.just("forget"), st.just(0), st.just(0)),
        ),
        max_size=60,
    )
)
def test_the_pace_stays_between_floor_and_ceiling(events: list[tuple[str, float, float]]) -> None:
    controller, now = PaceController(SETTINGS), 0.0
    for name, a, b in events:
        if name == "judge":
            controller.judge(StepTimes(min(a, b), max(a, b), 9), BASE, now)
        elif name == "look":
            now += a
            controller.update(now, measured=bool(b))
        elif name == "adopt":
            controller.apply_settings(PaceSettings(0.1, int(a), int(b), 100))
        else:
            controller.reset()
        bounds = controller.settings
        assert bounds.floor_bytes <= controller.bytes_per_step <= bounds.ceiling_bytes
        assert controller.reason


@settings(max_examples=40, deadline=None)
@given(bearable=st.integers(1_500, 60_000))
def test_it_converges_to_what_training_bears(bearable: int) -> None:
    """Steps slow down as soon as more is copied than they bear: the pace saw-tooths around that."""
    controller, paces = running(), []
    for turn in range(200):
        if controller.state is PaceState.PAUSED:
            controller.update(turn * 100.0, measured=True)
        controller.judge(SLOW if controller.bytes_per_step > bearable else FINE, BASE, turn * 100.0)
        paces.append(controller.bytes_per_step)
    late = paces[100:]
    assert max(late) <= bearable + SETTINGS.increase_bytes
    assert sum(late) / len(late) >= 0.45 * bearable


@settings(max_examples=30, deadline=None)
@given(noise=st.lists(st.booleans(), min_size=1, max_size=50))
def test_it_recovers_after_a_noisy_time(noise: list[bool]) -> None:
    controller, now = running(), 0.0
    for slow in noise:
        controller.judge(SLOW if slow else FINE, BASE, now)
        now += 1
    now += SETTINGS.longest_pause_seconds
    controller.update(now, measured=True)
    for _ in range(SETTINGS.ceiling_bytes // SETTINGS.increase_bytes + 1):
        controller.judge(FINE, BASE, now)
    assert controller.bytes_per_step == SETTINGS.ceiling_bytes


def test_quantiles_are_weighted_by_steps() -> None:
    assert StepTimes.of([]) is None
    assert StepTimes.of([(1.0, 0)]) is None
    times = StepTimes.of([(0.5, 1), (0.1, 90), (0.2, 9)])
    assert times == StepTimes(0.1, 0.1, 3)
    assert StepTimes.of([(0.1, 5), (0.2, 5)]) == StepTimes(0.1, 0.2, 2)


def test_a_window_keeps_the_newest() -> None:
    window = StepWindow(3)
    for seconds in (9.0, 1.0, 2.0, 3.0):
        window.add(seconds, 1)
    assert window.times() == StepTimes(2.0, 3.0, 3)


@pytest.mark.parametrize(
    "wrong", [{"floor_bytes": 0}, {"floor_bytes": 70_000}, {"increase_bytes": 0}, {"first_pause_seconds": 0.0}]
)
def test_settings_that_contradict_each_other_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ControlError):
        PaceSettings(**{"tolerance": 0.1, "floor_bytes": 1, "ceiling_bytes": 2, "increase_bytes": 1, **wrong})
