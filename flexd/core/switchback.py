"""Statistics of a switchback: blocks of steps with and without a part of the replicas, in pairs of random order.

The two blocks of a pair are neighbours in time, and a coin decides which of them comes first. Under the hypothesis that
the replicas change nothing, the coin decides the sign of the pair's difference, whatever the load did: drift, heavy
tails and correlated noise only change its size. So the signed-rank test is exact, and its inversion gives the interval.
The looks at which a verification may end share the error probability.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

import numpy as np

# Pairs of the first look: with fewer, no difference is significant at the level of a look.
FIRST_LOOK = 8
PAIRS_BETWEEN_LOOKS = 4


class Verdict(Enum):
    """Result of a switchback."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Effect:
    """Change of the step time by the replicas, as a share of the step without them; positive is slower.

    Attributes:
        pairs: pairs of blocks that it is from.
        share: estimate; NaN without a pair.
        low: lower end of the confidence interval; -inf if there are too few pairs.
        high: upper end; inf if there are too few pairs.
    """

    pairs: int
    share: float
    low: float
    high: float

    def describe(self, confidence: float) -> str:
        """Return the effect in words, such as ``3.1 % slower (95 % interval 1.2 % to 5.0 %, 12 pairs)``."""
        if not self.pairs:
            return "not measured"
        message = f"{abs(self.share):.1%} {'slower' if self.share > 0 else 'faster'}".replace("%", " %")
        if not math.isfinite(self.low):
            return f"{message} ({self.pairs} pairs of blocks, too few for an interval)"
        interval = f"{100 * self.low:+.1f} % to {100 * self.high:+.1f} %"
        return f"{message} ({confidence * 100:g} % interval {interval}, {self.pairs} pairs of blocks)"


@dataclass(frozen=True)
class SwitchbackRule:
    """When a switchback ends, and its verdict.

    Attributes:
        max_pairs: pairs after which it ends in any case, at least ``FIRST_LOOK``.
        confidence: probability that no look gives a wrong FASTER or SLOWER.
        resolution: a change within +- this share of the step counts as none.
    """

    max_pairs: int
    confidence: float
    resolution: float

    @property
    def looks(self) -> tuple[int, ...]:
        """Numbers of pairs after which it may end."""
        return (*range(FIRST_LOOK, self.max_pairs, PAIRS_BETWEEN_LOOKS), self.max_pairs)

    def effect(self, without: Sequence[float], with_replicas: Sequence[float]) -> Effect:
        """Estimate the effect from the seconds of a step in the blocks of every pair, at the level of one look."""
        return estimate_effect(without, with_replicas, (1 - self.confidence) / len(self.looks))

    def verdict(self, effect: Effect, *, last: bool = False) -> Verdict | None:
        """Return the verdict after these pairs; None to continue.

        Args:
            last: no further pair follows.
        """
        last = last or effect.pairs >= self.max_pairs
        if effect.pairs not in self.looks and not last:
            return None
        if effect.low > 0:
            return Verdict.SLOWER
        if effect.high < 0:
            return Verdict.FASTER
        if -self.resolution <= effect.low and effect.high <= self.resolution:
            return Verdict.SAME
        return Verdict.UNDECIDED if last else None


def keeps_plan(verdict: Verdict, *, takes_back: bool = False) -> bool:
    """Return whether a measured plan stays: copies only if they were shown to win.

    Args:
        takes_back: the plan takes copies back. It stays unless that was shown to lose.
    """
    return verdict is not Verdict.SLOWER if takes_back else verdict is Verdict.FASTER


def estimate_effect(without: Sequence[float], with_replicas: Sequence[float], error: float) -> Effect:
    """Estimate the effect by the median of the Walsh averages of log ratios (Hodges and Lehmann).

    Args:
        without: seconds of a step in the block without the replicas, by pair.
        with_replicas: seconds of a step in the block with them, by pair.
        error: probability that the interval does not contain the effect.
    """
    pairs = len(without)
    if pairs == 0:
        return Effect(0, math.nan, -math.inf, math.inf)
    change = np.log(np.asarray(with_replicas, dtype=np.float64) / np.asarray(without, dtype=np.float64))
    first, second = np.triu_indices(pairs)
    averages = np.sort((change[first] + change[second]) / 2)
    share = float(np.expm1(np.median(averages)))
    left_out = _averages_left_out(pairs, error)
    if left_out < 0:
        return Effect(pairs, share, -math.inf, math.inf)
    return Effect(
        pairs, share, float(np.expm1(averages[left_out])), float(np.expm1(averages[len(averages) - 1 - left_out]))
    )


@cache
def _averages_left_out(pairs: int, error: float) -> int:
    """Return how many Walsh averages lie beyond each end of the interval; -1 if there are too few pairs for any."""
    counts = np.ones(1)
    for rank in range(1, pairs + 1):
        counts = np.convolve(counts, np.r_[1.0, np.zeros(rank - 1), 1.0]) / 2
    return int(np.searchsorted(np.cumsum(counts), error / 2, side="right")) - 1
