"""The phases of training steps: averages of a rank, and of the job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.control.protocol.report import PHASE_QUANTITIES, StepPhase, StepReport

Float64Array = npt.NDArray[np.float64]

RECENT_STEPS = 50
"""Averages of a rank cover about this number of its newest steps."""
_PHASES = {phase.value: number for number, phase in enumerate(StepPhase)}


@dataclass(frozen=True)
class PhaseAverages:
    """Per step, over about ``RECENT_STEPS`` of the newest steps.

    Attributes:
        values: float64[phase, quantity], phases as in ``StepPhase``, quantities as in ``PHASE_QUANTITIES``.
        cover_seconds: compute that could cover collectives beside the training thread.
    """

    values: Float64Array
    cover_seconds: float

    @staticmethod
    def of(report: StepReport, known: PhaseAverages | None) -> PhaseAverages | None:
        """Return the averages with a report; a report without phases changes nothing."""
        if report.phase_steps < 1:
            return known
        values = np.zeros((len(_PHASES), len(PHASE_QUANTITIES)))
        for phase in report.phases:
            if phase.phase in _PHASES:
                values[_PHASES[phase.phase]] = [getattr(phase, name) for name in PHASE_QUANTITIES]
        values /= report.phase_steps
        cover = report.cover_seconds / report.phase_steps
        if known is None:
            return PhaseAverages(values, cover)
        weight = min(1.0, report.phase_steps / RECENT_STEPS)
        return PhaseAverages(
            known.values + weight * (values - known.values),
            known.cover_seconds + weight * (cover - known.cover_seconds),
        )

    def quantity(self, name: str) -> Float64Array:
        """Return float64[phase]."""
        column: Float64Array = self.values[:, PHASE_QUANTITIES.index(name)]
        return column


def mean_phases(ranks: Iterable[PhaseAverages | None]) -> PhaseAverages | None:
    """Return the mean over the ranks that have reported phases; None without any."""
    known = [rank for rank in ranks if rank is not None]
    if not known:
        return None
    return PhaseAverages(
        np.mean([rank.values for rank in known], axis=0), float(np.mean([rank.cover_seconds for rank in known]))
    )
