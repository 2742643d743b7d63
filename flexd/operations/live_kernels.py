"""Learned costs of look-ups and updates on the devices of the running job, corrected by what its steps report."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flexd.control.protocol.report import PHASE_QUANTITIES, StepPhase
from flexd.planner.model.price_correction import PriceCorrection, PriceSample
from flexd.planner.tables.kernel_costs import PHASES, KernelCosts

if TYPE_CHECKING:
    from flexd.topology.kernel_file import KernelMeasurements

Float64Array = npt.NDArray[np.float64]

_COMPUTED = PHASE_QUANTITIES.index("computed_seconds")
_STEP_PHASES = {"lookup": (StepPhase.ROWS,), "update": (StepPhase.PUSH, StepPhase.UPDATE)}
"""Phases of a step whose computing is the kernels' of each of ``PHASES``."""
_NUMBERS = {phase: number for number, phase in enumerate(StepPhase)}


class LiveKernels:
    """Thread-safe. Costs are learned when a plan needs them first: that takes seconds, which no start waits for.

    Look-up and update have a correction each, as curves have (``PriceCorrection``, one factor): the computing of their
    phases on every rank beside what the costs predict for the rules that the ranks have. A prediction is made with a
    plan of rules, and holds until those rules or the ranks change. Corrections are learnt in any case.

    Args:
        measurements: of the kernels that the ranks run; checked (``kernel_costs.check_measurements``).
    """

    def __init__(self, measurements: KernelMeasurements) -> None:
        self._measurements = measurements
        self._learning, self._lock = threading.Lock(), threading.Lock()
        self._learned: KernelCosts | None = None
        self._expected: Float64Array | None = None
        self._corrections = {phase: PriceCorrection() for phase in PHASES}

    def costs(self, *, corrected: bool) -> KernelCosts:
        """Return the costs that plans are priced with.

        Args:
            corrected: with factors from steps (``planner.correct_prices``).
        """
        with self._learning:
            if self._learned is None:
                self._learned = KernelCosts.learned(self._measurements)
            learned = self._learned
        if not corrected:
            return learned
        return learned.with_factors([correction.factors[1] for correction in self.corrections().values()])

    def corrections(self) -> dict[str, PriceCorrection]:
        """Return what steps have shown, by ``PHASES``."""
        with self._lock:
            return dict(self._corrections)

    def expect(self, seconds: Float64Array | None) -> None:
        """Compare steps from now on with this prediction.

        Args:
            seconds: float64[W, 2] of a step of each rank, by ``PHASES``, without factors; None: the ranks' rules are
                about to change.
        """
        with self._lock:
            self._expected = seconds

    def forget(self) -> None:
        """Forget the prediction and the corrections: other ranks train now."""
        with self._lock:
            self._expected = None
            self._corrections = {phase: PriceCorrection() for phase in PHASES}

    def learn(self, values: Float64Array) -> None:
        """Learn from float64[W, phase, quantity] of a mean step, phases as in ``StepPhase``, quantities as in
        ``PHASE_QUANTITIES``. Nothing is learnt without a prediction for as many ranks."""
        with self._lock:
            if self._expected is None or len(self._expected) != len(values):
                return
            for number, (phase, parts) in enumerate(_STEP_PHASES.items()):
                measured = values[:, [_NUMBERS[part] for part in parts], _COMPUTED].sum(axis=1)
                predicted = self._expected[:, number]
                sample = PriceSample(np.zeros(len(measured)), predicted, measured)
                self._corrections[phase] = self._corrections[phase].learn(sample)
