"""The benchmark of the counters: copies are worth something in its settings, and a plan of nothing passes no check."""

import pytest
from bench_accuracy import (
    CHECKED_DIVISOR,
    CHECKED_SETTINGS,
    LEAST_SAVING,
    Pricing,
    Setting,
    _next_window_checks,
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


def test_a_sketch_may_add_what_exact_counters_miss_in_the_next_window_and_a_plan_of_nothing_may_not() -> None:
    setting = CHECKED_SETTINGS[0]
    exact = f"c_{setting.prefix}next_window_exact_miss"
    added = f"c_memory_1_{CHECKED_DIVISOR}_{setting.prefix}next_window_added"

    def passes(miss: float, adds: float, saving: float) -> bool:
        (check,) = _next_window_checks({exact: miss, added: adds}, "c", setting, saving)
        return bool(check["ok"])

    assert passes(0.02, 0.01, saving=0.1)
    assert not passes(0.02, 0.03, saving=0.1)
    assert not passes(0.02, 0.01, saving=0.015)
    assert not _next_window_checks({}, "c", setting, 0.1)


def test_the_next_window_is_another_draw_of_the_same_distribution() -> None:
    case = zipf_case(1.2, 2_000, 100_000)
    (mine,), (following,) = case.counts(), case.next_window().counts()
    assert (mine != following).any()
    hottest = mine.argmax()
    assert abs(mine[hottest] - following[hottest]) < 0.05 * mine[hottest]
    counted = [count(each, 16 * dense_bytes(case) + 2**26) for each in (case, case.next_window())]
    pricing = Pricing(case, counted[0], CHECKED_SETTINGS[0], counted[1])
    judged = [pricing.judge(each.profile(pricing.per_step)) for each in counted]
    name = f"{CHECKED_SETTINGS[0].prefix}next_window_added"
    assert judged[0][name] == 0
    assert judged[1][name] == (pricing.next_best - pricing.next_exact) / pricing.next_best < 0
