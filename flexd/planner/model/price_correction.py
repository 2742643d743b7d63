"""Correct the prices of one curve by what steps report: a regression with forgetting, used where it predicts better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]

FORGETTING = 0.9
"""Weight of everything learnt when another report arrives: about the newest ten reports count."""
MIN_REPORTS = 8
"""Reports before the curve is left."""
LARGEST_FACTOR = 8.0
"""Factors lie between its inverse and it."""
USE_BELOW, KEEP_BELOW = 0.8, 0.95
"""A correction comes into use when its held-out error is below this share of that of the simpler prices, and stays
until it exceeds the second one."""
LEAST_ERROR = 0.05
"""Prices whose held-out error is below this share of what was measured are right: nothing replaces them."""
MOST_ERROR, KEEP_ERROR = 0.4, 0.5
"""Nor is a correction used unless its held-out error is below this share of what was measured, or kept above the second
one: what factors of bytes and latency do not explain (ranks that wait for each other in turns) is no price."""
DEAD_BAND = 0.1
"""Factors in use stay until others differ by more than this share: plans made at prices that differ by noise would move
rows to and fro."""
_SHRINKAGE = 0.3
"""Weight of "the curve is right" in reports."""
_LARGEST_RATIO = 2 * LARGEST_FACTOR
"""Measured seconds count up to so many times those of the curve: one stopped rank is no price."""


class Correction(IntEnum):
    """The prices that compete, from the simplest on."""

    PROBED = 0
    """The curve as it is."""
    COMMON = 1
    """One factor for latency and transfer: all that phases whose messages are alike can show."""
    SEPARATE = 2
    """A factor for the latency and one for the transfer: phases with small and with large messages are there."""


IN_USE = len(Correction)
"""Place in ``errors`` of the prices that were in use when a report arrived."""


@dataclass(frozen=True)
class PriceSample:
    """The phases of one report that the curve prices, all float64[phases].

    Attributes:
        latency_seconds: the curve's latency times the collectives of a step.
        transfer_seconds: the bytes of a step over the curve's bandwidth.
        measured_seconds: what the step took for them.
    """

    latency_seconds: Float64Array
    transfer_seconds: Float64Array
    measured_seconds: Float64Array

    @property
    def usable(self) -> bool:
        """True if all is finite, not negative, and the curve predicts some time."""
        values = np.concatenate([self.latency_seconds, self.transfer_seconds, self.measured_seconds])
        predicted = self.latency_seconds + self.transfer_seconds
        return bool(np.isfinite(values).all() and (values >= 0).all() and predicted.sum() > 0)


@dataclass(frozen=True)
class PriceCorrection:
    """What reports have shown of one curve. Its size does not grow; ``learn`` returns the next one.

    Seconds of a phase are ``latency factor x latency + transfer factor x transfer``, fitted by least squares with
    exponential forgetting and a ridge towards 1 (Haykin, Adaptive Filter Theory, 4th edition, chapter 9.2, as normal
    equations). A phase has the weight of one over its predicted seconds: noise grows with the time. Each report is
    predicted before it is learnt from, so that errors are held-out ones (prequential; Dawid 1984).

    Attributes:
        gram, moment: float64[2, 2] and float64[2]: the normal equations for (latency, transfer).
        errors: float64[4]: forgotten absolute errors of the three ``Correction`` and of the prices in use, seconds.
        measured_seconds: forgotten sum of what was measured, in the same units.
        reports: number of reports learnt from.
        correction: the prices in use.
        factors: (latency, transfer) factors in use.
    """

    gram: Float64Array = field(default_factory=lambda: np.zeros((2, 2)))
    moment: Float64Array = field(default_factory=lambda: np.zeros(2))
    errors: Float64Array = field(default_factory=lambda: np.zeros(len(Correction) + 1))
    measured_seconds: float = 0.0
    reports: int = 0
    correction: Correction = Correction.PROBED
    factors: tuple[float, float] = (1.0, 1.0)

    def learn(self, sample: PriceSample) -> PriceCorrection:
        """Return the correction with one report more; an unusable report changes nothing."""
        if not sample.usable:
            return self
        keep = (sample.latency_seconds + sample.transfer_seconds) > 0
        parts = np.stack([sample.latency_seconds[keep], sample.transfer_seconds[keep]], axis=1)
        predicted = parts.sum(axis=1)
        measured = np.clip(sample.measured_seconds[keep], 0.0, _LARGEST_RATIO * predicted)
        prices = np.array([*self.fitted(), self.factors])
        errors = np.abs(measured - prices @ parts.T).sum(axis=1)
        total = predicted.sum()
        gram = FORGETTING * self.gram + (parts / predicted[:, None]).T @ parts / total
        moment = FORGETTING * self.moment + (parts / predicted[:, None]).T @ measured / total
        learnt = PriceCorrection(
            gram, moment, FORGETTING * self.errors + errors,
            FORGETTING * self.measured_seconds + float(measured.sum()), self.reports + 1, self.correction, self.factors,
        )  # fmt: skip
        return learnt._with_choice()

    def fitted(self) -> tuple[tuple[float, float], ...]:
        """Return the (latency, transfer) factors of each ``Correction``."""
        # The sums of the gram's columns are those over phases: with equal factors the model is measured = f predicted.
        common = _bounded((_SHRINKAGE + self.moment.sum()) / (_SHRINKAGE + self.gram.sum()))
        solved = np.linalg.solve(self.gram + _SHRINKAGE * np.eye(2), self.moment + _SHRINKAGE)
        return (1.0, 1.0), (common, common), (_bounded(solved[0]), _bounded(solved[1]))

    def error_share(self, prices: int) -> float:
        """Return the held-out error of a ``Correction`` or of ``IN_USE`` as a share of what was measured; NaN before
        the first report."""
        return float(self.errors[prices]) / self.measured_seconds if self.measured_seconds > 0 else float("nan")

    def reason(self) -> str:
        """Return in words why these prices are in use."""
        if self.reports < MIN_REPORTS:
            return f"as probed: {self.reports} of {MIN_REPORTS} reports"
        probed = f"{self.error_share(Correction.PROBED):.0%}"
        if self.correction is Correction.PROBED:
            best = min((Correction.COMMON, Correction.SEPARATE), key=lambda prices: self.errors[prices])
            return f"as probed: held-out error {probed}, corrected {self.error_share(best):.0%}"
        latency, transfer = self.factors
        words = f"all x{latency:.2f}" if latency == transfer else f"latency x{latency:.2f}, bytes x{transfer:.2f}"
        return f"{words}: held-out error {self.error_share(self.correction):.0%}, as probed {probed}"

    def _with_choice(self) -> PriceCorrection:
        chosen = self._choose() if self.reports >= MIN_REPORTS else Correction.PROBED
        fitted = self.fitted()[chosen]
        moved = any(abs(new / old - 1) > DEAD_BAND for new, old in zip(fitted, self.factors, strict=True))
        factors = fitted if chosen is not self.correction or moved else self.factors
        return PriceCorrection(
            self.gram, self.moment, self.errors, self.measured_seconds, self.reports, chosen, factors
        )

    def _choose(self) -> Correction:
        chosen = self.correction
        simpler = [prices for prices in Correction if prices < chosen]
        if simpler and self.errors[chosen] > KEEP_BELOW * min(self.errors[prices] for prices in simpler):
            chosen = min(simpler, key=lambda prices: float(self.errors[prices]))
        if chosen is not Correction.PROBED and self.error_share(chosen) > KEEP_ERROR:
            chosen = Correction.PROBED
        for prices in Correction:
            better = prices > chosen and self.errors[prices] < USE_BELOW * self.errors[chosen]
            if better and self.error_share(chosen) > LEAST_ERROR and self.error_share(prices) < MOST_ERROR:
                chosen = prices
        return chosen


def _bounded(factor: float) -> float:
    return float(min(LARGEST_FACTOR, max(1.0 / LARGEST_FACTOR, factor)))


def join_samples(samples: Sequence[PriceSample]) -> PriceSample:
    """Return the phases of several samples of one curve as one."""
    return PriceSample(
        np.concatenate([sample.latency_seconds for sample in samples]),
        np.concatenate([sample.transfer_seconds for sample in samples]),
        np.concatenate([sample.measured_seconds for sample in samples]),
    )
