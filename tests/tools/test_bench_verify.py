"""The benchmark of verified plans: when a daemon has decided, and intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tools.bench.cases.verify import has_settled, interval


def status(plans: dict[str, int], verification: str | None = None, migration: str | None = None) -> dict[str, Any]:
    return {
        "planning": {
            "plans": plans,
            "verification": {"newest": None if verification is None else {"state": verification}},
        },
        "migration": None if migration is None else {"state": migration},
    }


@pytest.mark.parametrize(
    ("given", "settled"),
    [
        ({}, False),
        (status({"refused": 9}), False),
        (status({"unchanged": 1}), False),
        (status({"unchanged": 1, "withheld": 1}), True),
        (status({"changed": 1}, None, "pushing"), False),
        (status({"changed": 1}, None, "committed"), False),
        (status({"changed": 1}, "running", "committed"), False),
        (status({"changed": 1}, "slower", "applying"), False),
        (status({"changed": 1}, "slower", "committed"), True),
        (status({"changed": 1, "unchanged": 2}, "faster", "committed"), True),
    ],
)
def test_a_decision_is_a_verdict_or_twice_nothing_to_move(given: dict[str, Any], settled: bool) -> None:
    assert has_settled(given) is settled


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    for count in (9, 15):
        found = [interval(rng.normal(1.0, 0.1, count).tolist()) for _ in range(2_000)]
        covered = np.mean([low <= 1.0 <= high for low, high in found])
        assert 0.94 <= covered <= 0.995, (count, covered)
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
