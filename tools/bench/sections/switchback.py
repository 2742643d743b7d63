"""Rates of wrong decisions of the switchback, in simulated jobs whose load changes, has heavy tails or is correlated.

Wrong: a plan that makes steps slower and stays, one that makes them faster and is rolled back, and, with an effect of
0, any significant verdict (with 95 % confidence at most 0.05).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.planner.switchback import SwitchbackRule, Verdict, keeps_plan
from tools.bench.harness import Outcome, at_most

Floats = npt.NDArray[np.float64]
BLOCK_STEPS = 16
NOISE = 0.03
"""Standard deviation of the noise of a step, as a share of it."""


def quiet(rng: np.random.Generator, steps: int) -> Floats:
    """Return independent noise."""
    return 1 + NOISE * rng.standard_normal(steps)


def load_changes(rng: np.random.Generator, steps: int) -> Floats:
    """Return noise of a job that is half as fast from a random step in the middle on."""
    slow = np.arange(steps) >= rng.integers(steps // 4, 3 * steps // 4)
    return quiet(rng, steps) * np.where(slow, 2.0, 1.0)


def drifts(rng: np.random.Generator, steps: int) -> Floats:
    """Return noise of a job whose steps grow to 1.5 times."""
    return quiet(rng, steps) * np.linspace(1.0, 1.5, steps)


def heavy_tails(rng: np.random.Generator, steps: int) -> Floats:
    """Return noise with one step of twenty longer by a Pareto factor."""
    return quiet(rng, steps) * np.where(rng.random(steps) < 0.05, 1 + rng.pareto(1.5, steps), 1.0)


def correlated(rng: np.random.Generator, steps: int) -> Floats:
    """Return noise that remembers for about 50 steps, longer than a block."""
    shocks, value, out = NOISE * rng.standard_normal(steps) * np.sqrt(1 - 0.98**2), 0.0, np.empty(steps)
    for step, shock in enumerate(shocks):
        value = 0.98 * value + shock
        out[step] = 1 + value
    return out * quiet(rng, steps)


SCENARIOS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "quiet": quiet, "load doubles": load_changes, "drift": drifts, "heavy tails": heavy_tails, "correlated": correlated,
}  # fmt: skip


def trimmed(block: Floats) -> float:
    ordered = np.sort(block)
    return float(ordered[len(block) // 5 : len(block) - len(block) // 5].mean())


def run(rng: np.random.Generator, scenario: str, effect: float, rule: SwitchbackRule) -> tuple[Verdict, bool, int]:
    """Simulate one verification. Returns the verdict, whether the plan stays, and the pairs used."""
    steps = SCENARIOS[scenario](rng, 2 * rule.max_pairs * BLOCK_STEPS).reshape(rule.max_pairs, 2, BLOCK_STEPS)
    without: list[float] = []
    with_replicas: list[float] = []
    for pair in steps:
        first = int(rng.integers(2))
        with_replicas.append(trimmed(pair[first] * (1 + effect)))
        without.append(trimmed(pair[1 - first]))
        found = rule.effect(without, with_replicas)
        verdict = rule.verdict(found)
        if verdict is not None:
            return verdict, keeps_plan(verdict), found.pairs
    raise AssertionError("the last look gives a verdict")


def rates(scenario: str, effect: float, runs: int, rule: SwitchbackRule, seed: int) -> dict[str, Any]:
    """Return the rate of wrong decisions over simulated verifications."""
    rng = np.random.default_rng(seed)
    ended = [run(rng, scenario, effect, rule) for _ in range(runs)]
    if effect == 0:
        wrong = sum(verdict in (Verdict.FASTER, Verdict.SLOWER) for verdict, _, _ in ended)
    else:
        wrong = sum(kept != (effect < 0) for _, kept, _ in ended)
    return {
        "scenario": scenario, "effect": effect, "wrong": wrong / runs,
        "undecided": sum(verdict is Verdict.UNDECIDED for verdict, _, _ in ended) / runs,
        "pairs": float(np.mean([pairs for _, _, pairs in ended])),
    }  # fmt: skip


def checks_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Verdicts without an effect are rare, and an effect of 5 % is seen; the slack is three standard errors of 300."""
    without = max(row["wrong"] for row in rows if row["effect"] == 0)
    large = max(row["wrong"] for row in rows if abs(row["effect"]) >= 0.05)
    return [
        at_most("significant verdicts without an effect, worst load", without, 0.09),
        at_most("wrong decisions at an effect of 5 %, worst load", large, 0.05),
    ]


def section(options: Namespace) -> Outcome:
    rule = SwitchbackRule(24, confidence=0.95, resolution=0.005)
    rows = [
        rates(scenario, effect, 100 if options.quick else options.verifications, rule, 0)
        for scenario in SCENARIOS
        for effect in (0.0, 0.02, 0.05, -0.02, -0.05)
    ]
    return Outcome({f"{row['scenario']} {row['effect']:+.0%}": row for row in rows}, checks_of(rows))
