"""The adaptive controller is bounded, converges and recovers for any step times."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.operations.pacing import PaceController, PaceState, StepQuantiles

FLOOR, CEILING, INCREASE = 1_000, 65_000, 4_000
BASE = StepQuantiles(0.010, 0.012, 100)
FINE = StepQuantiles(0.0105, 0.0125, 20)
SLOW = StepQuantiles(0.0105, 0.014, 20)


def running() -> PaceController:
    controller = PaceController(FLOOR, CEILING)
    controller.update(0.0, measured=True)
    assert controller.state is PaceState.RUNNING
    return controller


def test_fast_steps_add_to_the_limit_and_slow_steps_halve_it() -> None:
    controller = running()
    at_first = controller.bytes_per_step
    controller.judge(FINE, BASE, 1.0)
    assert controller.bytes_per_step == at_first + 4_000
    controller.judge(SLOW, BASE, 2.0)
    assert controller.bytes_per_step == (at_first + 4_000) // 2
    assert controller.reason == "slowed: p90 of a step is 14 ms, 1.17 times the 12 ms without"
    assert (controller.sped, controller.slowed, controller.pauses) == (1, 1, 0)


def test_pauses_at_the_floor_double_up_to_a_bound_and_have_a_reason() -> None:
    controller = running()
    now = 0.0
    while controller.state is PaceState.RUNNING:
        controller.judge(SLOW, BASE, now)
    assert controller.bytes_per_step == FLOOR
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
    assert "paused for 5 s" in controller.reason, "fast steps reset the pause length"


@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("judge"), st.floats(1e-6, 1.0), st.floats(1e-6, 1.0)),
            st.tuples(st.just("update"), st.floats(0, 50), st.booleans()),
            st.tuples(st.just("set_bounds"), st.integers(1, 5_000), st.integers(5_000, 100_000)),
            st.tuples(st.just("reset"), st.just(0), st.just(0)),
        ),
        max_size=60,
    )
)
def test_the_pace_stays_between_floor_and_ceiling(events: list[tuple[str, float, float]]) -> None:
    controller, now = PaceController(FLOOR, CEILING), 0.0
    for name, a, b in events:
        if name == "judge":
            controller.judge(StepQuantiles(min(a, b), max(a, b), 9), BASE, now)
        elif name == "update":
            now += a
            controller.update(now, measured=bool(b))
        elif name == "set_bounds":
            controller.set_bounds(int(a), int(b))
        else:
            controller.reset()
        assert controller.floor_bytes <= controller.bytes_per_step <= controller.ceiling_bytes
        assert controller.reason


@settings(max_examples=40, deadline=None)
@given(tolerated=st.integers(1_500, 60_000))
def test_the_pace_converges_to_the_tolerated_bytes(tolerated: int) -> None:
    """Steps slow down above a number of copied bytes: the pace saw-tooths around it."""
    controller, paces = running(), []
    for turn in range(200):
        if controller.state is PaceState.PAUSED:
            controller.update(turn * 100.0, measured=True)
        controller.judge(SLOW if controller.bytes_per_step > tolerated else FINE, BASE, turn * 100.0)
        paces.append(controller.bytes_per_step)
    late = paces[100:]
    assert max(late) <= tolerated + INCREASE
    assert sum(late) / len(late) >= 0.45 * tolerated


def test_quantiles_are_weighted_by_steps() -> None:
    assert StepQuantiles.of([]) is None
    assert StepQuantiles.of([(1.0, 0)]) is None
    times = StepQuantiles.of([(0.5, 1), (0.1, 90), (0.2, 9)])
    assert times == StepQuantiles(0.1, 0.1, 3)
    assert StepQuantiles.of([(0.1, 5), (0.2, 5)]) == StepQuantiles(0.1, 0.2, 2)
