"""Simulated jobs for the tuner: step times of arms under drift, bursts, slow ranks, and steps of mixed sizes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.embedding.tuner import Tuner

Factors = npt.NDArray[np.float64]
LATENCY_STEPS = 2
"""Steps until a proposed arm is in use."""
NOISES = ("plain", "noisy", "drift", "bursts", "slow rank", "mixed sizes", "tails", "busy machine")
TIMES = {
    "one wins by 40 %": (1.4, 1.0, 1.3, 1.7),
    "one of each way wins by 25 %": (1.03, 1.3, 1.0, 1.25),
    "one wins by 3 %": (1.03, 1.0, 1.03, 1.2),
    "the first wins by 3 %": (1.0, 1.03, 1.05, 1.3),
    "two, by 3 %": (1.03, 1.0),
    "all alike": (1.005, 1.0, 1.008, 1.01),
}
"""Of a step of each arm."""


def noise(kind: str, steps: int, rng: np.random.Generator) -> Factors:
    """Return float64 [steps], what the machine does to the time of each step."""
    at = np.arange(steps)
    factors = np.exp(rng.normal(0, 0.03, steps))
    if kind == "noisy":
        factors = np.exp(rng.normal(0, 0.12, steps))
    elif kind == "drift":
        factors *= 1 + 0.15 * np.sin(2 * np.pi * (at / rng.uniform(300, 3000) + rng.random()))
    elif kind == "bursts":  # half as slow again, for 5 to 40 steps, every 300 steps
        for begin in np.cumsum(rng.exponential(300, steps // 100).astype(int)):
            factors[begin : begin + int(rng.integers(5, 40))] *= 1.5
    elif kind == "slow rank":  # 30 % slower in a fifth of the periods of 200 steps
        factors *= np.repeat(np.where(rng.random(steps // 200 + 1) < 0.2, 1.3, 1.0), 200)[:steps]
    elif kind == "mixed sizes":
        factors *= np.exp(rng.normal(0, 0.15, steps))
    elif kind == "busy machine":  # other work that comes and goes, and takes half of a processor
        lengths = np.maximum(rng.exponential(12, steps).astype(int), 1)
        busy = np.repeat(np.where(rng.random(steps) < 0.4, 1 + 0.5 * rng.random(steps), 1.0), lengths)[:steps]
        factors *= busy * np.exp(rng.normal(0, 0.06, steps))
    elif kind == "tails":
        factors *= 1 + 0.05 * rng.pareto(1.5, steps)
    return factors


@dataclass(frozen=True)
class Simulated:
    """A simulated job.

    Attributes:
        excess: step time of the arm that was chosen in the end over that of the best one, less 1.
        regret: the same over all steps.
        longest_slow_row: most steps in a row in one arm that is 10 % slower than the best, after the first trial.
        explored_steps: as the tuner states them.
        first_steps: steps until the first trial ended.
    """

    excess: float
    regret: float
    longest_slow_row: int
    explored_steps: float
    first_steps: int


def simulate(factors: Factors, times_at: Sequence[Sequence[float]], seed: int) -> Simulated:
    """Run a tuner.

    Args:
        factors: of each step.
        times_at: times of the arms in equal parts of the job, one after another.
    """
    arms = range(len(times_at[0]))
    tuner = Tuner(arms[0], random.Random(seed))
    in_use, before, lost, row, longest, first = arms[0], -1, 0.0, 0, 0, len(factors)
    coming = [in_use] * LATENCY_STEPS
    for step, factor in enumerate(factors):
        times = times_at[step * len(times_at) // len(factors)]
        excess = times[in_use] / min(times) - 1
        lost += excess
        row = (row + 1 if in_use == before else 1) if excess > 0.1 and tuner.trials else 0
        before, longest = in_use, max(longest, row)
        if tuner.step(times[in_use] * factor, in_use, arms) and tuner.trials == 1:
            first = step
        coming.append(tuner.wanted)
        in_use = coming.pop(0)
    last = times_at[-1]
    return Simulated(last[tuner.chosen] / min(last) - 1, lost / len(factors), longest, tuner.explored_steps, first)
