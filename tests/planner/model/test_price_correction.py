"""Prices of a curve corrected by reports: what is learnt, and when it is used."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from flexd.planner.model.price_correction import (
    DEAD_BAND,
    IN_USE,
    LARGEST_FACTOR,
    MIN_REPORTS,
    Correction,
    PriceCorrection,
    PriceSample,
    join_samples,
)

Truth = Callable[[int], tuple[float, float]]
IDS_AND_ROWS = (np.array([2e-3, 1e-3, 1e-3]), np.array([0.2e-3, 8e-3, 9e-3]))
"""Seconds of latency and transfer: a phase that the latency decides and two that the bytes do."""
ALIKE = (np.array([1e-3, 2e-3]), np.array([3e-3, 6e-3]))
"""Phases in which latency and bytes have the same shares: one cannot be told from the other."""


def learn(
    truth: Truth,
    reports: int = 60,
    *,
    phases: tuple[np.ndarray, np.ndarray] = IDS_AND_ROWS,
    noise: float = 0.05,
    seed: int = 0,
    spikes: float = 0.0,
) -> tuple[PriceCorrection, float, float]:
    """Return the correction, and the summed errors of the prices in use and of the curve."""
    rng, correction, used, probed = np.random.default_rng(seed), PriceCorrection(), 0.0, 0.0
    for number in range(reports):
        latency, transfer = phases[0], phases[1] * rng.uniform(0.95, 1.05)
        factors = truth(number)
        measured = (factors[0] * latency + factors[1] * transfer) * np.exp(noise * rng.standard_normal(len(latency)))
        measured = measured * (rng.uniform(2, 20) if rng.random() < spikes else 1.0)
        in_use = correction.factors
        used += float(np.abs(measured - in_use[0] * latency - in_use[1] * transfer).sum())
        probed += float(np.abs(measured - latency - transfer).sum())
        correction = correction.learn(PriceSample(latency, transfer, measured))
    return correction, used, probed


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.6, 4.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_common_factor_is_found_under_noise(factor: float, seed: int) -> None:
    correction, _, _ = learn(lambda _: (factor, factor), seed=seed, noise=0.1)
    assert correction.correction is Correction.COMMON
    shrunk = (0.3 + 10 * factor) / 10.3  # the curve counts as 0.3 reports beside about ten
    assert correction.fitted()[Correction.COMMON][0] == pytest.approx(shrunk, rel=0.1)
    assert correction.factors[0] == correction.factors[1] == pytest.approx(shrunk, rel=0.1 + DEAD_BAND)


@pytest.mark.parametrize("truth", [(1.0, 4.0), (4.0, 1.0), (0.5, 3.0)])
def test_two_factors_are_found_where_phases_differ(truth: tuple[float, float]) -> None:
    correction, _, _ = learn(lambda _: truth, noise=0.03)
    assert correction.correction is Correction.SEPARATE
    # The curve counts as 0.3 reports, for the latency beside little data: both factors lean towards 1.
    for factor, true in zip(correction.factors, truth, strict=True):
        assert abs(factor - true) <= 0.3 * max(abs(true - 1), 0.9)
        assert abs(factor - true) < abs(sum(truth) / 2 - true)


def test_one_factor_is_used_where_phases_are_alike() -> None:
    correction, _, _ = learn(lambda _: (1.0, 4.0), phases=ALIKE, noise=0.03)
    assert correction.correction is Correction.COMMON
    assert correction.factors == pytest.approx((3.25, 3.25), rel=0.1)


def test_a_curve_that_holds_stays() -> None:
    for seed in range(10):
        correction, used, probed = learn(lambda _: (1.0, 1.0), seed=seed, noise=0.2)
        assert correction.correction is Correction.PROBED
        assert correction.factors == (1.0, 1.0)
        assert used == probed


def test_a_curve_that_is_nearly_right_stays() -> None:
    correction, _, _ = learn(lambda _: (1.03, 1.03), noise=0.0)
    assert correction.errors[Correction.COMMON] < 0.5 * correction.errors[Correction.PROBED]
    assert correction.correction is Correction.PROBED


def test_a_link_that_changes_is_followed_and_forgotten() -> None:
    def changed(number: int) -> tuple[float, float]:
        return (3.0, 3.0) if 40 <= number < 80 else (1.0, 1.0)

    before, _, _ = learn(changed, 40)
    during, _, _ = learn(changed, 70)
    after, _, _ = learn(changed, 120)
    assert before.correction is Correction.PROBED
    assert during.factors == pytest.approx((3.0, 3.0), rel=0.15)
    assert (after.correction, after.factors) == (Correction.PROBED, (1.0, 1.0))


def test_drift_is_followed() -> None:
    correction, used, probed = learn(lambda number: (1 + number / 50, 1 + number / 50), 100)
    assert correction.factors[1] == pytest.approx(3.0, rel=0.3)
    assert used < 0.5 * probed


SCENARIOS: dict[str, Truth] = {
    "holds": lambda _: (1.0, 1.0),
    "slower": lambda _: (2.0, 2.0),
    "faster": lambda _: (0.5, 0.5),
    "bytes": lambda _: (1.0, 3.0),
    "jump": lambda number: (1.0, 1.0) if number < 50 else (4.0, 4.0),
    "drift": lambda number: (1 + number / 100, 1 + number / 50),
    "to and fro, 5": lambda number: (4.0, 4.0) if number // 5 % 2 else (1.0, 1.0),
    "to and fro, 15": lambda number: (4.0, 4.0) if number // 15 % 2 else (1.0, 1.0),
    "to and fro, 25": lambda number: (1.0, 2.0) if number // 25 % 2 else (1.0, 1.0),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_prices_in_use_are_never_worse_than_the_curve_by_more_than_a_margin(scenario: str, noise: float) -> None:
    for seed in range(8):
        _, used, probed = learn(SCENARIOS[scenario], 200, noise=noise, seed=seed, spikes=0.02)
        assert used <= 1.1 * probed, (scenario, noise, seed, used / probed)


def test_what_no_factor_explains_is_not_used() -> None:
    """Ranks that wait for each other in turns: far above the curve, and without a pattern."""
    rng, correction = np.random.default_rng(3), PriceCorrection()
    for _ in range(60):
        latency, transfer = IDS_AND_ROWS
        measured = (latency + transfer) * rng.choice([0.5, 12.0], len(latency))
        correction = correction.learn(PriceSample(latency, transfer, measured))
        assert correction.correction is Correction.PROBED
    assert correction.error_share(Correction.COMMON) > 0.5


def in_turns(number: int) -> tuple[float, float]:
    return (3.0, 3.0) if number % 2 else (12.0, 12.0)


def test_less_wrong_than_the_curve_is_not_enough() -> None:
    correction, used, probed = learn(in_turns, 60, noise=0.0)
    assert correction.errors[Correction.COMMON] < 0.8 * correction.errors[Correction.PROBED]
    assert correction.error_share(Correction.COMMON) > 0.5
    assert correction.correction is Correction.PROBED
    assert used == probed


def test_a_correction_that_explains_nothing_any_more_leaves() -> None:
    before, _, _ = learn(lambda _: (6.0, 6.0), 40, noise=0.0)
    assert before.correction is Correction.COMMON
    after, _, _ = learn(lambda number: (6.0, 6.0) if number < 40 else in_turns(number), 80, noise=0.0)
    assert after.errors[Correction.COMMON] < 0.95 * after.errors[Correction.PROBED]
    assert after.correction is Correction.PROBED


def test_a_correction_leaves_once_the_curve_is_as_good() -> None:
    before, _, _ = learn(lambda _: (1.3, 1.3), 40, noise=0.02)
    assert before.correction is Correction.COMMON
    after, _, _ = learn(lambda number: (1.3, 1.3) if number < 40 else (1.0, 1.0), 100, noise=0.02)
    assert after.correction is Correction.PROBED


def test_nothing_is_used_before_there_are_enough_reports() -> None:
    for reports in range(1, MIN_REPORTS):
        correction, _, _ = learn(lambda _: (4.0, 4.0), reports)
        assert correction.factors == (1.0, 1.0)
        assert correction.reason() == f"as probed: {reports} of {MIN_REPORTS} reports"
    assert learn(lambda _: (4.0, 4.0), MIN_REPORTS)[0].correction is Correction.COMMON


@pytest.mark.parametrize("factor", [1e-12, 1e-3, 100.0, 1e12])
def test_factors_and_state_are_bounded(factor: float) -> None:
    correction, _, _ = learn(lambda _: (factor, factor), 300, noise=0.0)
    for latency, transfer in correction.fitted():
        assert 1 / LARGEST_FACTOR <= latency <= LARGEST_FACTOR
        assert 1 / LARGEST_FACTOR <= transfer <= LARGEST_FACTOR
    assert (correction.gram.shape, correction.moment.shape, correction.errors.shape) == ((2, 2), (2,), (4,))
    # The weights of all reports add up to 1 / (1 - forgetting) at most.
    assert correction.gram.sum() <= 10.0 + 1e-9


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("where", range(3))
def test_a_bad_report_changes_nothing(bad: float, where: int) -> None:
    before, _, _ = learn(lambda _: (2.0, 2.0), 20)
    columns = [np.array([1e-3, 2e-3]) for _ in range(3)]
    columns[where][1] = bad
    assert before.learn(PriceSample(*columns)) is before


def test_phases_without_predicted_time_are_left_out() -> None:
    nothing = PriceSample(np.zeros(1), np.zeros(1), np.ones(1))
    some = PriceSample(np.array([1e-3]), np.array([2e-3]), np.array([6e-3]))
    assert PriceCorrection().learn(nothing).reports == 0
    both, alone = (PriceCorrection().learn(sample) for sample in (join_samples([nothing, some]), some))
    assert (both.gram == alone.gram).all()
    assert both.fitted() == alone.fitted()


def test_learning_changes_no_argument() -> None:
    first, _, _ = learn(lambda _: (2.0, 2.0), 10)
    gram, factors = first.gram.copy(), first.factors
    first.learn(PriceSample(np.array([1e-3]), np.array([2e-3]), np.array([9e-3])))
    assert (first.gram == gram).all()
    assert first.factors == factors


def test_a_report_is_predicted_before_it_is_learnt_from() -> None:
    sample = PriceSample(np.array([1e-3]), np.array([3e-3]), np.array([12e-3]))
    once = PriceCorrection().learn(sample)
    assert once.errors == pytest.approx([8e-3] * 4), "nothing was known before the first report"
    common = once.fitted()[Correction.COMMON][0]
    twice = once.learn(sample)
    assert twice.errors[Correction.COMMON] == pytest.approx(0.9 * 8e-3 + (12e-3 - common * 4e-3))
    assert twice.errors[IN_USE] == twice.errors[Correction.PROBED]


def test_factors_in_use_stay_within_a_dead_band() -> None:
    seen = set()
    correction = PriceCorrection()
    rng = np.random.default_rng(0)
    for _ in range(100):
        latency, transfer = IDS_AND_ROWS
        measured = 3.0 * (latency + transfer) * np.exp(0.05 * rng.standard_normal(3))
        correction = correction.learn(PriceSample(latency, transfer, measured))
        seen.add(correction.factors)
    assert len(seen) <= 4, "prices that change with noise would move rows to and fro"


def test_reasons_name_both_errors() -> None:
    corrected, _, _ = learn(lambda _: (4.0, 4.0), 60)
    assert corrected.reason().startswith("all x")
    assert "as probed 75%" in corrected.reason()
    separate, _, _ = learn(lambda _: (1.0, 4.0), 60, noise=0.02)
    assert separate.reason().startswith("latency x")
    held, _, _ = learn(lambda _: (1.0, 1.0), 60)
    assert held.reason().startswith("as probed: held-out error ")
