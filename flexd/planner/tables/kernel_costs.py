"""Seconds of the kernels of a set of tables, learned from measurements; which of three models is used is decided by
held-out error.

*analytic*: bytes over a bandwidth. *physical*: a sum of terms of work, each with a price of at least 0 (non-negative
least squares of relative errors). *boosted*: the physical model times a correction by gradient boosting that never
falls in any term. All three grow with every term of work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flexd.core.errors import MissingExtraError, PlanError
from flexd.planner.tables.kernel_work import DIMS_TERM, Pieces, analytic_bytes
from flexd.topology.kernel_file import KernelMeasurements, read_kernels

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

PHASES = ("lookup", "update")
FOLDS = 5
LEAST_SETS = 40
"""Measured sets below which no model is learned."""
_REWEIGHTINGS = 10
_LEAST_RELATIVE = 0.02
"""Relative errors below this weigh alike."""


class SetModel(Protocol):
    """Seconds of sets of tables by their work."""

    def seconds(self, work: Float64Array) -> Float64Array:
        """Return float64[n] of float64[n, TERMS]."""
        ...

    def added(self, work: Float64Array) -> Float64Array:
        """Return float64[n]: ``seconds`` without what a step takes once, whatever its tables are."""
        ...


@dataclass(frozen=True)
class AnalyticModel:
    """Bytes over a bandwidth.

    Attributes:
        phase: index of ``PHASES``.
        seconds_per_byte: of that phase.
    """

    phase: int
    seconds_per_byte: float

    @classmethod
    def fit(cls, work: Float64Array, seconds: Float64Array, phase: int) -> AnalyticModel:
        """Choose the bandwidth whose relative errors have the least median."""
        size = analytic_bytes(work)[:, phase]
        return cls(phase, float(np.exp(np.median(np.log(seconds / np.maximum(size, 1.0))))))

    def seconds(self, work: Float64Array) -> Float64Array:
        """See ``SetModel``."""
        result: Float64Array = analytic_bytes(work)[:, self.phase] * self.seconds_per_byte
        return result

    def added(self, work: Float64Array) -> Float64Array:
        """See ``SetModel``."""
        return self.seconds(work)


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
        """See ``SetModel``."""
        result: Float64Array = self.prices[0] * (work[:, DIMS_TERM] > 0) + work @ self.prices[1:]
        return result

    def added(self, work: Float64Array) -> Float64Array:
        """See ``SetModel``: dims are kernels, which a step has once."""
        result: Float64Array = work[:, :DIMS_TERM] @ self.prices[1 : 1 + DIMS_TERM]
        return result


@dataclass(frozen=True)
class BoostedModel:
    """The physical model times a correction that never falls in any term of work.

    Attributes:
        physical: the model under it.
        trees: scikit-learn's regression of the logarithm of measured over physical seconds.
    """

    physical: PhysicalModel
    trees: Any

    @classmethod
    def fit(cls, work: Float64Array, seconds: Float64Array) -> BoostedModel:
        """Fit logarithms of the correction by squared errors. With absolute ones scikit-learn sets leaves to medians
        after the tree has grown, and the result is not monotone.

        Raises:
            MissingExtraError: scikit-learn is not installed.
        """
        try:
            from sklearn.ensemble import HistGradientBoostingRegressor
            from threadpoolctl import threadpool_limits
        except ImportError as error:
            raise _without_sklearn() from error
        physical = PhysicalModel.fit(work, seconds)
        trees = HistGradientBoostingRegressor(
            loss="squared_error", max_iter=100, learning_rate=0.1, max_leaf_nodes=8, min_samples_leaf=5,
            l2_regularization=1.0, monotonic_cst=np.ones(work.shape[1], np.int64), random_state=0,
            early_stopping=False,
        )  # fmt: skip
        # Several threads wait for each other longer than so few sets take.
        with threadpool_limits(1):
            trees.fit(np.log1p(work), np.log(seconds / physical.seconds(work)))
        return cls(physical, trees)

    def seconds(self, work: Float64Array) -> Float64Array:
        """See ``SetModel``."""
        result: Float64Array = self.physical.seconds(work) * self._correction(work)
        return result

    def added(self, work: Float64Array) -> Float64Array:
        """See ``SetModel``."""
        result: Float64Array = self.physical.added(work) * self._correction(work)
        return result

    def _correction(self, work: Float64Array) -> Float64Array:
        factor: Float64Array = np.exp(self.trees.predict(np.log1p(work)))
        return factor


FITS: Mapping[str, Callable[[Float64Array, Float64Array, int], SetModel]] = {
    "analytic": AnalyticModel.fit,
    "physical": lambda work, seconds, _: PhysicalModel.fit(work, seconds),
    "boosted": lambda work, seconds, _: BoostedModel.fit(work, seconds),
}
"""The models in the order in which an equal error is settled."""


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
        analytic: fitted to the same measurements.
        chosen: of ``FITS``, that of the least held-out error.
        model: it.
        errors: of each of ``FITS``, by cross-validation over sets.
        least, most: float64[TERMS], work of the measured sets.
        factor: what all seconds are multiplied with, from steps of a job.
    """

    analytic: AnalyticModel
    chosen: str
    model: SetModel
    errors: Mapping[str, HeldOutError]
    least: Float64Array
    most: Float64Array
    factor: float = 1.0

    @property
    def seconds_per_byte(self) -> float:
        """Of the analytic model, with the factor."""
        return self.factor * self.analytic.seconds_per_byte

    def seconds(self, work: Float64Array) -> Float64Array:
        """Return float64[n] seconds of float64[n, TERMS]; beyond the measured sets the analytic model carries on from
        their edge."""
        inside = np.clip(work, self.least, self.most)
        result: Float64Array = self.factor * self.model.seconds(inside) * self._beyond(work, inside)
        return result

    def added(self, work: Float64Array) -> Float64Array:
        """Return float64[n]: ``seconds`` without what a step takes once."""
        inside = np.clip(work, self.least, self.most)
        result: Float64Array = self.factor * self.model.added(inside) * self._beyond(work, inside)
        return result

    def _beyond(self, work: Float64Array, inside: Float64Array) -> Float64Array:
        """float64[n]: growth of the analytic model from the edge of the data; 0 without tables."""
        edge = self.analytic.seconds(inside)
        growth = self.analytic.seconds(work) / np.where(edge > 0, edge, 1.0)
        result: Float64Array = np.maximum(growth, 1.0) * (work[:, DIMS_TERM] > 0)
        return result

    def measured_share(self, work: Float64Array) -> float:
        """Return the share of the seconds of float64[n, TERMS] that lies within the measured sets: 0 to 1."""
        total = float(self.seconds(work).sum())
        inside = self.factor * float(self.model.seconds(np.clip(work, self.least, self.most)).sum())
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
        """Fit all models, and choose by held-out error.

        Raises:
            PlanError, MissingExtraError: see ``check_measurements``.
        """
        check_measurements(measurements)
        work, times = work_of(measurements), (measurements.answer_seconds, measurements.update_seconds)
        return cls(measurements, tuple(_phase(work, seconds, at) for at, seconds in enumerate(times)))

    @property
    def factors(self) -> Float64Array:
        """float64[2], of ``PHASES``."""
        return np.array([phase.factor for phase in self.phases])

    def with_factors(self, factors: Sequence[float]) -> KernelCosts:
        """Return the costs with other factors of ``PHASES``."""
        scaled = (replace(phase, factor=factor) for phase, factor in zip(self.phases, factors, strict=True))
        return replace(self, phases=tuple(scaled))

    def seconds(self, work: Float64Array) -> Float64Array:
        """Return float64[n, 2], by ``PHASES``, of float64[n, TERMS]."""
        return np.stack([phase.seconds(work) for phase in self.phases], axis=1)


def check_measurements(measurements: KernelMeasurements) -> None:
    """Check that costs can be learned from measurements, without learning them.

    Raises:
        PlanError: too few sets, or one that took no time.
        MissingExtraError: scikit-learn is not installed.
    """
    if len(measurements.sets) < LEAST_SETS:
        raise PlanError(
            f"{len(measurements.sets)} measured sets of tables, {LEAST_SETS} are needed",
            remedy="give flexd probe --kernels a larger budget",
        )
    if min(float(seconds.min()) for seconds in (measurements.answer_seconds, measurements.update_seconds)) <= 0:
        raise PlanError("a set of tables took no time", remedy="measure the kernels again")
    if find_spec("sklearn") is None:
        raise _without_sklearn()


def read_flexd_kernels(path: Path) -> KernelMeasurements:
    """Read measurements of flexd's kernels from which costs can be learned.

    Raises:
        TopologyError: see ``read_kernels``.
        PlanError: they are of other kernels.
        PlanError, MissingExtraError: see ``check_measurements``.
    """
    measurements = read_kernels(path)
    if measurements.kernels != "flexd":
        raise PlanError(
            f"{path}: kernels of {measurements.kernels!r}, the ranks run flexd's",
            remedy="measure with flexd probe --kernels FILE --kernels-of flexd",
        )
    check_measurements(measurements)
    return measurements


def _without_sklearn() -> MissingExtraError:
    return MissingExtraError("learned kernel costs need scikit-learn", remedy="pip install 'flexd[learned]'")


def work_of(measurements: KernelMeasurements) -> Float64Array:
    """Return float64[C, TERMS] of the measured sets."""
    pieces, place = Pieces.of_sets(measurements.sets)
    return pieces.work(place, len(measurements.sets))


def _phase(work: Float64Array, seconds: Float64Array, phase: int) -> PhaseCosts:
    fold = np.random.default_rng(0).permutation(len(work)) % FOLDS
    errors = {}
    for name, fit in FITS.items():
        predicted = np.empty(len(work))
        for number in range(FOLDS):
            held = fold == number
            predicted[held] = fit(work[~held], seconds[~held], phase).seconds(work[held])
        errors[name] = HeldOutError.of(predicted, seconds)
    chosen = min(FITS, key=lambda name: errors[name].median + errors[name].high)
    return PhaseCosts(
        AnalyticModel.fit(work, seconds, phase), chosen, FITS[chosen](work, seconds, phase), errors,
        work.min(axis=0), work.max(axis=0),
    )  # fmt: skip
