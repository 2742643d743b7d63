"""The tuner finds the fastest arm, follows changes and explores little. ``tools.bench auto`` prints the whole table."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from flexd.embedding.tuner import (
    BLOCK_STEPS,
    FIRST_PAUSE_STEPS,
    QUIET_STEPS,
    START_STEPS,
    Tuner,
)
from tools.bench.sections.tuning_noise import NOISES, Simulated, noise, simulate


@pytest.mark.parametrize("kind", NOISES)
def test_the_fastest_arm_is_found_under_noise_and_exploring_costs_little(kind: str) -> None:
    def run(steps: int, times: Sequence[float], seed: int) -> Simulated:
        return simulate(noise(kind, steps, np.random.default_rng(seed)), [times], seed)

    runs = [run(5_000, (1.4, 1.0, 1.3, 1.7), seed) for seed in range(8)]
    assert [one.excess for one in runs] == [0.0] * len(runs)
    assert np.mean([one.regret for one in runs]) < 0.025
    assert max(one.longest_slow_row for one in runs) <= 16
    close = [run(5_000, (1.03, 1.0, 1.03, 1.2), seed) for seed in range(12)]
    assert sum(one.excess > 0 for one in close) <= 1
    assert max(one.first_steps for one in (*runs, *close)) <= 500


@pytest.mark.parametrize("kind", ["plain", "bursts", "noisy"])
@pytest.mark.parametrize("after", [(0.6, 0.8), (1.0, 4.0), (3.0, 4.0)])
def test_a_change_of_the_link_is_followed(kind: str, after: tuple[float, float]) -> None:
    for seed in range(5):
        factors = noise(kind, 3_000, np.random.default_rng(seed))
        assert simulate(factors, [(1.2, 1.0), after], seed).excess == 0.0, "within 1,500 steps"


def steps(tuner: Tuner[str], number: int, times: dict[str, float], version: int = 0, **options: bool) -> list[str]:
    """Return the arm of each step, the one that was wanted if it is there."""
    used = []
    for _ in range(number):
        used.append(tuner.wanted if tuner.wanted in times else next(iter(times)))
        tuner.step(times[used[-1]], used[-1], list(times), version=version, **options)
    return used


def test_a_placement_that_settles_is_a_cause_and_one_that_changes_stops_a_block() -> None:
    times = {"a": 1.0, "b": 1.5}
    tuner: Tuner[str] = Tuner("a", random.Random(1))
    steps(tuner, 500, times)
    assert (tuner.trials, tuner.chosen) == (1, "a")
    assert set(steps(tuner, QUIET_STEPS - 1, {"a": 1.05, "b": 0.9}, version=2)) == {"a"}
    assert (steps(tuner, 100, {"a": 1.05, "b": 0.9}, version=2)[-1], tuner.trials) == ("b", 2)
    measured = tuner.measured_at_step
    # A placement that changes with every step lets no block end.
    tuner._begin_at = 0
    steps(tuner, 1, {"a": 1.05, "b": 1.0}, version=2)
    for version in range(3, 60):
        steps(tuner, 1, {"a": 1.05, "b": 0.9}, version=version)
    assert (tuner.trial is not None, tuner.measured_at_step) == (True, measured)


def test_nobody_measures_out_of_turn_and_other_arms_are_measured_anew_once() -> None:
    tuner: Tuner[str] = Tuner("a", random.Random(1))
    assert set(steps(tuner, 200, {"a": 1.0, "b": 0.5}, may_begin=False)) == {"a"}
    assert steps(tuner, 200, {"a": 1.0, "b": 0.5})[-1] == "b"
    assert set(steps(tuner, 3 * START_STEPS, {"a": 1.0})) == {"a"}, "a loop that lets choose nothing"
    assert set(steps(tuner, 500, {"a": 1.0, "b": 0.5})[1:]) == {"b"}, "what was chosen is remembered"
    assert steps(tuner, 200, {"a": 1.0, "b": 0.5, "c": 0.2})[-1] == "c"
    tuner.begin_with("a")
    assert tuner.wanted == "c", "what is measured counts more than a price"


def test_trials_become_rare_and_leave_out_what_was_far_slower() -> None:
    tuner: Tuner[str] = Tuner("a", random.Random(1))
    used = steps(tuner, FIRST_PAUSE_STEPS + 1_000, {"a": 1.0, "b": 1.02, "c": 2.0})
    first = used[: FIRST_PAUSE_STEPS // 2]
    assert {"b", "c"} <= set(first)
    assert set(used[FIRST_PAUSE_STEPS // 2 :]) == {"a", "b"}
    # Two blocks of an arm that takes twice as long, which end early.
    assert first.count("c") <= 2 * BLOCK_STEPS
    assert [(one.arm, one.seconds) for one in tuner.times] == [("a", 1.0), ("b", 1.02), ("c", 2.0)]
