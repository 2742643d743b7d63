"""Seconds of the kernels of a set of tables, learned from measurements: a sum of terms of work, each with a price of at
least 0 (non-negative least squares of relative errors), which grows with every term. Beyond the measured sets it grows
as the bytes do that the kernels move.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.errors import PlanError
from flexd.planner.tables.kernel_work import DIMS_TERM, Pieces, analytic_bytes
from flexd.topology.kernel_file import KernelMeasurements

Float64Array = npt.NDArray[np.float64]

PHASES = ("lookup", "update")
FOLDS = 5
LEAST_SETS = 40
"""Measured sets below which no model is learned."""
_REWEIGHTINGS = 10
_LEAST_RELATIVE = 0.02
"""Relative errors below this weigh alike."""


@dataclass(frozen=True)
class PhysicalModel:
    """Terms of work, each with a price of at least 0, and a fixed time of a step.

    Attributes:
        prices: float64[1 + TERMS] seconds, the fixed time first.
    """

    prices: Float64Array

    @classmethod
    def fit(cls, work: Float64Array, seconds: Float64Array) -> PhysicalModel:
        """Minimise relative errors, large ones by their size and not by its square.

        They are relative to the geometric mean of measured and predicted seconds: relative to the measured ones alone
        low predictions would cost less than high ones.
        """
        # Imported on first use: a daemon without measured kernels needs none of it.
        from scipy.optimize import nnls

        terms = np.concatenate([np.ones((len(work), 1)), work], axis=1)
        scale = np.maximum((terms / seconds[:, None]).max(axis=0), 1e-300)
        middle, weight, prices = seconds, np.ones(len(work)), np.zeros(terms.shape[1])
        for _ in range(_REWEIGHTINGS):
            prices, _ = nnls(terms / scale * (weight / middle)[:, None], seconds * weight / middle)
            predicted = np.maximum(terms @ (prices / scale), 1e-3 * seconds)
            error = np.abs(np.log(predicted / seconds))
            weight = 1.0 / np.sqrt(np.maximum(error, _LEAST_RELATIVE))
            middle = np.sqrt(seconds * predicted)
        return cls(prices / scale)

    def seconds(self, work: Float64Array) -> Float64Array:
        """Return float64[n] of float64[n, TERMS]."""
        result: Float64Array = self.prices[0] * (work[:, DIMS_TERM] > 0) + work @ self.prices[1:]
        return result

    def added(self, work: Float64Array) -> Float64Array:
        """Return float64[n]: ``seconds`` without what a step takes once, a fixed time and kernels of each dim."""
        result: Float64Array = work[:, :DIMS_TERM] @ self.prices[1 : 1 + DIMS_TERM]
        return result


@dataclass(frozen=True)
class HeldOutError:
    """Relative errors of sets that the model was not fitted to.

    Attributes:
        median, high: |predicted / measured - 1|, the median and the 95th percentile.
    """

    median: float
    high: float

    @classmethod
    def of(cls, predicted: Float64Array, measured: Float64Array) -> HeldOutError:
        """Compare predictions with measurements, float64[n] each."""
        error = np.abs(predicted / measured - 1.0)
        return cls(float(np.median(error)), float(np.quantile(error, 0.95)))


@dataclass(frozen=True)
class PhaseCosts:
    """The model of one phase.

    Attributes:
        phase: index of ``PHASES``.
        error: by cross-validation over sets.
        least, most: float64[TERMS], work of the measured sets.
    """

    phase: int
    model: PhysicalModel
    error: HeldOutError
    least: Float64Array
    most: Float64Array

    @classmethod
    def fit(cls, work: Float64Array, seconds: Float64Array, phase: int) -> PhaseCosts:
        """Learn from float64[C, TERMS] and float64[C]."""
        fold = np.random.default_rng(0).permutation(len(work)) % FOLDS
        predicted = np.empty(len(work))
        for number in range(FOLDS):
            held = fold == number
            predicted[held] = PhysicalModel.fit(work[~held], seconds[~held]).seconds(work[held])
        error = HeldOutError.of(predicted, seconds)
        return cls(phase, PhysicalModel.fit(work, seconds), error, work.min(axis=0), work.max(axis=0))

    def seconds(self, work: Float64Array) -> Float64Array:
        """Return float64[n] seconds of float64[n, TERMS]; beyond the measured sets those of their edge, times the
        growth of the bytes from there."""
        inside = np.clip(work, self.least, self.most)
        result: Float64Array = self.model.seconds(inside) * self._beyond(work, inside)
        return result

    def added(self, work: Float64Array) -> Float64Array:
        """Return float64[n]: ``seconds`` without what a step takes once."""
        inside = np.clip(work, self.least, self.most)
        result: Float64Array = self.model.added(inside) * self._beyond(work, inside)
        return result

    def _beyond(self, work: Float64Array, inside: Float64Array) -> Float64Array:
        """float64[n]: growth of the bytes from the edge of the data; 0 without tables."""
        edge, size = (analytic_bytes(each)[:, self.phase] for each in (inside, work))
        growth = size / np.where(edge > 0, edge, 1.0)
        result: Float64Array = np.maximum(growth, 1.0) * (work[:, DIMS_TERM] > 0)
        return result

    def measured_share(self, work: Float64Array) -> float:
        """Return the share of the seconds of float64[n, TERMS] that lies within the measured sets: 0 to 1."""
        total = float(self.seconds(work).sum())
        inside = float(self.model.seconds(np.clip(work, self.least, self.most)).sum())
        return min(1.0, inside / total) if total > 0 else 1.0


@dataclass(frozen=True)
class KernelCosts:
    """Seconds of look-up (with pooling) and update of sets of tables on one device.

    Attributes:
        measurements: what they were learned from.
        phases: of each of ``PHASES``.
    """

    measurements: KernelMeasurements
    phases: tuple[PhaseCosts, ...]

    @classmethod
    def learned(cls, measurements: KernelMeasurements) -> KernelCosts:
        """Learn the costs.

        Raises:
            PlanError: too few sets, or one that took no time.
        """
        if len(measurements.sets) < LEAST_SETS:
            raise PlanError(
                f"{len(measurements.sets)} measured sets of tables, {LEAST_SETS} are needed",
                remedy="give flexd probe --kernels a larger budget",
            )
        times = measurements.look_up_seconds, measurements.update_seconds
        if min(float(seconds.min()) for seconds in times) <= 0:
            raise PlanError("a set of tables took no time", remedy="measure the kernels again")
        work = work_of(measurements)
        return cls(measurements, tuple(PhaseCosts.fit(work, seconds, at) for at, seconds in enumerate(times)))

    def seconds(self, work: Float64Array) -> Float64Array:
        """Return float64[n, 2], by ``PHASES``, of float64[n, TERMS]."""
        return np.stack([phase.seconds(work) for phase in self.phases], axis=1)


def work_of(measurements: KernelMeasurements) -> Float64Array:
    """Return float64[C, TERMS] of the measured sets."""
    pieces, place = Pieces.of_sets(measurements.sets)
    return pieces.work(place, len(measurements.sets))
