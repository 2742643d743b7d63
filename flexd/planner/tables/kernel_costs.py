"""Seconds of the kernels of a set of tables, learned from measurements: a sum of terms of work, each with a price of at
least 0 (non-negative least squares of relative errors), which grows with every term. Beyond the measured sets it grows
as the bytes do that the kernels move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.errors import PlanError
from flexd.topology.kernel_file import KernelMeasurements, TableSet

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

TERMS = (
    "tables", "ids", "bags", "distinct", "read_bytes", "sum_bytes", "distinct_bytes", "stored_bytes", "numbers",
    "lines", "sorted", "distinct_lines", "far_lines", "narrow_numbers", "dims",
)  # fmt: skip
"""Sums over tables, but the last: the number of different dims, which kernels are fused by."""
TABLES, IDS, BAGS, DISTINCT, READ_BYTES, SUM_BYTES, DISTINCT_BYTES = range(7)
DIMS_TERM = len(TERMS) - 1
STATE_BYTES = 4.0
"""Row-wise Adagrad's, which the probe runs."""
_LINE_BYTES = 64.0
_NEAR_BYTES = 2.0**20
"""A table of this size is taken as near to the processor: about a core's own cache."""


@dataclass(frozen=True)
class Pieces:
    """Tables, or pieces of tables, that a rank holds.

    A piece adds its terms to those of its rank, so the work of every rank under a placement is one sum. Each term grows
    with rows, dim, look-ups, bags and distinct rows, and with every table that is added: a model that grows with each
    term is monotone where physics is.

    Attributes:
        rows, dim, ids, bags, distinct: float64[n], as in ``TableSet``.
        row_bytes: float64[n].
    """

    rows: Float64Array
    dim: Float64Array
    ids: Float64Array
    bags: Float64Array
    distinct: Float64Array
    row_bytes: Float64Array

    @classmethod
    def of_sets(cls, sets: Sequence[TableSet]) -> tuple[Pieces, Int64Array]:
        """Return the tables of all sets, and int64[n] the set of each."""
        columns = [
            np.concatenate([getattr(one, name) for one in sets])
            for name in ("rows", "dim", "ids", "bags", "distinct", "row_bytes")
        ]
        return cls(*columns), np.repeat(np.arange(len(sets)), [len(one.rows) for one in sets])

    def chosen(self, at: Int64Array) -> Pieces:
        """Return the pieces with these numbers, each as often as it is named."""
        return Pieces(*(column[at] for column in vars(self).values()))

    def terms(self) -> Float64Array:
        """float64[n, TERMS], of each piece as a set of its own."""
        lines = np.ceil(self.row_bytes / _LINE_BYTES)
        distinct_lines = self.distinct * (lines + 1.0)  # and one of the optimizer's state
        stored = self.rows * self.row_bytes
        return np.stack(
            [
                np.ones(len(self.rows)), self.ids, self.bags, self.distinct, self.ids * self.row_bytes,
                4.0 * self.bags * self.dim, self.distinct * self.row_bytes, stored, self.ids * self.dim,
                self.ids * lines, self.ids * np.log2(self.ids + 1.0), distinct_lines,
                distinct_lines * np.log2(1.0 + stored / _NEAR_BYTES),
                # Numbers of rows in half precision, which are converted.
                self.distinct * self.dim * (self.row_bytes < 4.0 * self.dim), np.ones(len(self.rows)),
            ],
            axis=1,
        )  # fmt: skip

    def work(self, place: Int64Array, places: int) -> Float64Array:
        """Return float64[places, TERMS], the work of the pieces at each place."""
        terms = self.terms()
        work = np.stack([np.bincount(place, terms[:, at], places) for at in range(DIMS_TERM)], axis=1)
        pairs = np.unique(np.stack([place.astype(np.float64), self.dim], axis=1), axis=0)
        dims = np.bincount(pairs[:, 0].astype(np.int64), minlength=places).astype(np.float64)
        return np.concatenate([work, dims[:, None]], axis=1)


def analytic_bytes(work: Float64Array) -> Float64Array:
    """Return float64[n, 2]: bytes that look-up and update move, as the analytic model prices them
    (``chain_costs.kernel_bytes``)."""
    update = work[:, READ_BYTES] + 2.0 * (work[:, DISTINCT_BYTES] + STATE_BYTES * work[:, DISTINCT])
    return np.stack([work[:, READ_BYTES], update], axis=1)


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
