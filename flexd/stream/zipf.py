"""Draw bounded Zipf samples in bulk, exactly and without a table of probabilities."""

from __future__ import annotations

import math

import numpy as np

from flexd.core.arrays import Float64Array, Int64Array


class ZipfSampler:
    """Draw ranks 0..n-1 with probability proportional to ``(rank + 1) ** -exponent``.

    Rejection-inversion of W. Hörmann and G. Derflinger, "Rejection-inversion to generate variates from monotone
    discrete distributions", ACM TOMACS 6(3), 1996, algorithm RI; vectorised. Costs no memory per rank, so it serves
    tables of 10^9 rows.

    Args:
        ranks: n, at least 1.
        exponent: above 0.
    """

    def __init__(self, ranks: int, exponent: float) -> None:
        self._ranks = ranks
        self._exponent = exponent
        # The hat is the integral of x^-s over [k - 1/2, k + 1/2]; that of rank 1 is shortened to exactly its mass.
        self._low = float(self._integral(np.array(1.5))) - 1.0
        self._high = float(self._integral(np.array(ranks + 0.5)))
        inside = self._integral(np.array(2.5)) - 2.0**-exponent
        self._always = 2.0 - float(self._inverse(inside))

    def sample(self, count: int, random: np.random.Generator) -> Int64Array:
        """Draw int64[count] ranks."""
        ranks = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            # Acceptance is above 0.9 for common exponents; a tenth more makes a second round rare.
            want = count - filled
            u = self._high + random.random(want + want // 8 + 8) * (self._low - self._high)
            x = self._inverse(u)
            k = np.clip(np.rint(x), 1, self._ranks)
            accepted = (k - x <= self._always) | (u >= self._integral(k + 0.5) - k**-self._exponent)
            chosen = k[accepted][:want]
            ranks[filled : filled + len(chosen)] = chosen
            filled += len(chosen)
        ranks -= 1
        return ranks

    def _integral(self, x: Float64Array) -> Float64Array:
        """H(x), an antiderivative of x^-s: (x^(1-s) - 1) / (1 - s), log x at s = 1, without cancellation near it."""
        log_x = np.log(x)
        t = (1.0 - self._exponent) * log_x
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(np.abs(t) > 1e-8, np.expm1(t) / t, 1.0 + t / 2)
        return np.asarray(log_x * ratio)

    def _inverse(self, y: Float64Array) -> Float64Array:
        t = np.maximum(np.asarray(y) * (1.0 - self._exponent), -1.0 + 1e-15)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(np.abs(t) > 1e-8, np.log1p(t) / t, 1.0 - t / 2)
        return np.asarray(np.exp(y * ratio))


def scatter_multiplier(rows: int) -> int:
    """Return a factor coprime to ``rows``, near ``rows`` times the golden ratio, that keeps products below 2^63."""
    multiplier = max(1, min(int(rows * 0.6180339887), 2**62 // rows))
    while math.gcd(multiplier, rows) != 1:
        multiplier -= 1
    return multiplier


def scatter(ranks: Int64Array, rows: int, multiplier: int) -> Int64Array:
    """Map popularity ranks, int64 [n] of any integers, to rows of a table, int64 [n].

    The map is a bijection modulo ``rows`` that spreads neighbouring ranks over the table.
    """
    return (ranks % rows) * multiplier % rows
