"""Constants are chosen on other accesses than they are judged by."""

from __future__ import annotations

import numpy as np
from bench_half_life import checks_of, chosen, counted, judged

FIRSTS = {
    "a": {"1": 0.3, "4": 0.2, "16": 0.25, "64": 0.4}, "b": {"1": 0.5, "4": 0.6, "16": 0.7, "64": 0.8},
}  # fmt: skip
SECONDS = {
    name: {"1": 0.31, "4": 0.32, "16": 0.33, "64": 0.34, "live": 0.3, "LRU": 0.35, "Belady": 0.1} for name in FIRSTS
}


def test_a_constant_is_chosen_where_it_is_not_judged() -> None:
    assert chosen([FIRSTS["a"]]) == "4"
    assert chosen([FIRSTS["b"]]) == "1"
    found = judged(FIRSTS, SECONDS)
    assert (found["a"]["chosen on its first half"], found["a"]["chosen on the others"]) == (0.32, 0.31)
    assert (found["b"]["chosen on its first half"], found["b"]["chosen on the others"]) == (0.31, 0.32)
    assert [entry["ok"] for entry in checks_of(found)] == [True, True, True, True]
    found["a"]["live"] = 0.36
    assert [entry["ok"] for entry in checks_of(found)] == [False, False, True, True]


def test_misses_of_every_way_are_counted() -> None:
    weights = 1.0 / np.arange(1, 201)
    keys = np.random.default_rng(1).choice(200, 3_000, p=weights / weights.sum())
    found = counted(keys, 20, 1, all_ways=True)
    assert list(found) == ["1", "4", "16", "64", "live", "LRU", "Belady"]
    assert found["Belady"] <= min(found.values())
