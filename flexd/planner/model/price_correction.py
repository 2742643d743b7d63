"""Correct the prices of a link by what steps report: one factor, used where it predicts better."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

FORGETTING = 0.9
"""Weight of everything learnt when another report arrives: about the newest ten reports count."""
MIN_REPORTS = 8
"""Reports before the probed prices are left."""
LARGEST_FACTOR = 8.0
"""Factors lie between its inverse and it."""
USE_BELOW = 0.8
"""A factor comes into use when its held-out error is below this share of that of the probed prices, and stays in use
while its error is the smaller one."""
LEAST_ERROR = 0.05
"""Prices whose held-out error is below this share of what was measured are right: no factor replaces them."""
MOST_ERROR = 0.5
"""Nor is a factor used whose held-out error is above this share of what was measured: what no factor explains (ranks
that wait for each other in turns) is no price."""
DEAD_BAND = 0.1
"""A factor in use stays until another differs by more than this share: plans made at prices that differ by noise would
move rows to and fro."""
_SHRINKAGE = 0.3
"""Weight of "the probed prices are right" in reports."""


@dataclass(frozen=True)
class PriceCorrection:
    """What reports have shown of one link. Its size does not grow; ``learn`` returns the next one.

    Each report is predicted before it is learnt from, so that errors are held-out ones (prequential; Dawid 1984).

    Attributes:
        weight, ratios: forgotten number of reports, and sum of measured over predicted seconds.
        probed_error, corrected_error: forgotten absolute errors of the probed prices and with the learnt factor, as a
            share of what was measured in each report.
        reports: number of reports learnt from.
        used: whether the factor is in use.
        factor: in use; 1 if none is.
    """

    weight: float = 0.0
    ratios: float = 0.0
    probed_error: float = 0.0
    corrected_error: float = 0.0
    reports: int = 0
    used: bool = False
    factor: float = 1.0

    @property
    def fitted(self) -> float:
        """The factor that the reports show, shrunk towards 1."""
        shown = (_SHRINKAGE + self.ratios) / (_SHRINKAGE + self.weight)
        return min(LARGEST_FACTOR, max(1.0 / LARGEST_FACTOR, shown))

    def learn(self, predicted: float, measured: float) -> PriceCorrection:
        """Return the correction with one report more: seconds as the probed prices predict, and as measured. A report
        that is not finite and positive changes nothing."""
        if not (math.isfinite(predicted) and math.isfinite(measured) and predicted > 0 and measured > 0):
            return self
        # One stopped rank is no price.
        measured = min(measured, 2 * LARGEST_FACTOR * predicted)
        learnt = replace(
            self,
            weight=FORGETTING * self.weight + 1,
            ratios=FORGETTING * self.ratios + measured / predicted,
            probed_error=FORGETTING * self.probed_error + abs(measured - predicted) / measured,
            corrected_error=FORGETTING * self.corrected_error + abs(measured - self.fitted * predicted) / measured,
            reports=self.reports + 1,
        )
        used = learnt._predicts_better()
        fitted = learnt.fitted if used else 1.0
        moved = used is not self.used or abs(fitted / self.factor - 1) > DEAD_BAND
        return replace(learnt, used=used, factor=fitted if moved else self.factor)

    def error_shares(self) -> tuple[float, float]:
        """Return the held-out errors as probed and with the factor, as shares of what was measured; NaN before any
        report."""
        if not self.weight:
            return math.nan, math.nan
        return self.probed_error / self.weight, self.corrected_error / self.weight

    def reason(self) -> str:
        """Return in words why these prices are in use."""
        if self.reports < MIN_REPORTS:
            return f"as probed: {self.reports} of {MIN_REPORTS} reports"
        probed, corrected = self.error_shares()
        if not self.used:
            return f"as probed: held-out error {probed:.0%}, corrected {corrected:.0%}"
        return f"x{self.factor:.2f}: held-out error {corrected:.0%}, as probed {probed:.0%}"

    def _predicts_better(self) -> bool:
        probed, corrected = self.error_shares()
        if self.reports < MIN_REPORTS or corrected > MOST_ERROR:
            return False
        return corrected < probed and (self.used or (corrected < USE_BELOW * probed and probed > LEAST_ERROR))
