"""The factor of a link: learnt with forgetting, used where it predicts better."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flexd.planner.model.price_correction import DEAD_BAND, LARGEST_FACTOR, MIN_REPORTS, PriceCorrection


def learnt(factor: float, reports: int = 40, noise: float = 0.0, start: PriceCorrection | None = None):
    rng, correction = np.random.default_rng(0), start or PriceCorrection()
    for _ in range(reports):
        predicted = rng.uniform(1e-3, 5e-3)
        correction = correction.learn(predicted, factor * predicted * math.exp(noise * rng.standard_normal()))
    return correction


@pytest.mark.parametrize("factor", [0.3, 1.5, 2.6, 6.0])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_factor_is_found_and_used(factor: float, noise: float) -> None:
    found = learnt(factor, noise=noise)
    assert found.used
    assert found.factor == pytest.approx(factor, rel=0.2)
    probed, corrected = found.error_shares()
    assert corrected < probed
    assert found.reason().startswith(f"x{found.factor:.2f}: held-out error")


def test_nothing_is_corrected_before_there_are_enough_reports() -> None:
    assert not learnt(3.0, MIN_REPORTS - 1).used
    assert learnt(3.0, MIN_REPORTS - 1).reason() == f"as probed: {MIN_REPORTS - 1} of {MIN_REPORTS} reports"
    assert all(map(math.isnan, PriceCorrection().error_shares()))


@pytest.mark.parametrize(("factor", "noise"), [(1.0, 0.0), (1.03, 0.0), (1.0, 0.1), (1.0, 1.5)])
def test_prices_that_hold_or_that_no_factor_explains_are_not_touched(factor: float, noise: float) -> None:
    found = learnt(factor, noise=noise)
    assert (found.used, found.factor) == (False, 1.0)
    assert found.reason().startswith("as probed: held-out error")


def test_a_link_that_changes_back_is_as_probed_again() -> None:
    assert not learnt(1.0, start=learnt(4.0)).used


def test_a_factor_moves_only_beyond_the_dead_band() -> None:
    found = learnt(3.0)
    assert learnt(3.0 * (1 + DEAD_BAND / 3), start=found).factor == found.factor
    assert learnt(4.0, start=found).factor == pytest.approx(4.0, rel=0.15)


def test_factors_are_bounded() -> None:
    assert learnt(100.0).factor <= LARGEST_FACTOR
    assert learnt(0.01).factor >= 1 / LARGEST_FACTOR


@pytest.mark.parametrize("sample", [(0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.inf), (-1.0, 1.0)])
def test_an_unusable_report_changes_nothing(sample: tuple[float, float]) -> None:
    found = learnt(3.0)
    assert found.learn(*sample) is found
