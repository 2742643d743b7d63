"""The benchmark of the counters: copies are worth something in its settings, and a plan of nothing passes no check."""

import pytest
from bench_accuracy import (
    CHECKED_DIVISOR,
    CHECKED_SETTINGS,
    LEAST_SAVING,
    Pricing,
    Setting,
    _plan_checks,
    count,
    dense_bytes,
    zipf_case,
)  # fmt: skip


def checks(home: float, best: float, cost: float) -> list[object]:
    setting = CHECKED_SETTINGS[0]
    figures = {
        f"c_{setting.prefix}chain_exposed_seconds": home,
        f"c_{setting.prefix}exact_plan_exposed_seconds": best,
        f"c_memory_1_{CHECKED_DIVISOR}_{setting.prefix}plan_regret": cost / best - 1,
    }
    return [check["ok"] for check in _plan_checks(figures, "c", setting)]


@pytest.mark.parametrize("setting", CHECKED_SETTINGS, ids=lambda setting: setting.name)
def test_copies_are_worth_more_than_the_check_forgives(setting: Setting) -> None:
    case = zipf_case(1.05, 20_000, 100_000)
    pricing = Pricing(case, count(case, 16 * dense_bytes(case) + 2**26), setting)
    assert pricing.best_rows > 0
    assert pricing.home / pricing.best - 1 > LEAST_SAVING


def test_a_plan_of_nothing_passes_no_check() -> None:
    assert checks(home=1.1, best=1.0, cost=1.1) == [False, True]
    assert checks(home=1.001, best=1.0, cost=1.001) == [False, False]


def test_a_plan_near_the_best_passes_both() -> None:
    assert checks(home=1.1, best=1.0, cost=1.005) == [True, True]
