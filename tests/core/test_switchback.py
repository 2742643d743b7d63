"""Verdicts and intervals of a switchback. ``tools.bench verify`` simulates the jobs."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.switchback import Effect, SwitchbackRule, Verdict, estimate_effect, keeps_plan

RULE = SwitchbackRule(24, confidence=0.95, resolution=0.005)


def test_the_interval_is_the_inversion_of_the_exact_signed_rank_test() -> None:
    without, changed = [1.0] * 8, [math.exp(x) for x in (0.01, -0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)]
    # At 2 / 2^8 per end no Walsh average is left out, at 0.02 the outermost of each end.
    effect = estimate_effect(without, changed, 2 / 2**8 + 1e-9)
    assert (math.log1p(effect.low), math.log1p(effect.high)) == pytest.approx((-0.02, 1.28))
    wider = estimate_effect(without, changed, 2 / 2**8 - 1e-9)
    assert (wider.low, wider.high) == (-math.inf, math.inf)
    narrower = estimate_effect(without, changed, 4 / 2**8 + 1e-9)
    assert (math.log1p(narrower.low), math.log1p(narrower.high)) == pytest.approx((-0.005, 0.96))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.001, 100.0), min_size=8, max_size=24), st.floats(0.5, 2.0), st.integers(0, 2**31))
def test_the_effect_does_not_depend_on_units_and_turns_with_the_sides(
    blocks: list[float], unit: float, seed: int
) -> None:
    changed = np.array(blocks) * np.exp(0.1 * np.random.default_rng(seed).standard_normal(len(blocks)))
    effect = estimate_effect(blocks, changed, 0.01)
    scaled = estimate_effect(unit * np.array(blocks), unit * changed, 0.01)
    swapped = estimate_effect(changed, blocks, 0.01)
    assert effect.low <= effect.share <= effect.high
    assert scaled.share == pytest.approx(effect.share, abs=1e-9)
    assert (1 + swapped.low) * (1 + effect.high) == pytest.approx(1.0)


def test_looks_share_the_error_and_the_last_gives_a_verdict() -> None:
    assert RULE.looks == (8, 12, 16, 20, 24)
    assert RULE.verdict(Effect(9, 0.5, 0.4, 0.6)) is None, "no look"
    assert RULE.verdict(Effect(8, 0.5, 0.4, 0.6)) is Verdict.SLOWER
    assert RULE.verdict(Effect(8, -0.5, -0.6, -0.4)) is Verdict.FASTER
    assert RULE.verdict(Effect(12, 0.001, -0.004, 0.005)) is Verdict.SAME
    assert RULE.verdict(Effect(12, 0.001, -0.004, 0.006)) is None
    assert RULE.verdict(Effect(24, 0.001, -0.004, 0.006)) is Verdict.UNDECIDED
    assert RULE.verdict(Effect(9, 0.001, -0.004, 0.006), last=True) is Verdict.UNDECIDED


def test_only_a_plan_that_is_shown_to_win_stays() -> None:
    assert {verdict for verdict in Verdict if keeps_plan(verdict)} == {Verdict.FASTER}
    assert {verdict for verdict in Verdict if not keeps_plan(verdict, takes_back=True)} == {Verdict.SLOWER}
