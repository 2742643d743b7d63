"""The phases of training steps, averaged over a rank and over the job, and how much of them compute covers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.control.protocol.report import PHASE_QUANTITIES, StepPhase, StepReport
from flexd.topology.cluster import Cluster, Exposed

_SHARE_CHANGE, _COVER_CHANGE = 0.05, 0.1
"""Smaller changes are noise; plans made at other prices are hard to compare."""


def exposure(phases: PhaseAverages) -> Exposed:
    """Return the share of each part of the communication that did not run beside the training thread, and the compute
    that can cover the rest. Without collectives of a part its share is that of the whole."""
    communication = phases.quantity("intra_seconds") + phases.quantity("inter_seconds")
    overlapped = phases.quantity("overlapped_seconds")

    def share(*of: StepPhase) -> float | None:
        numbers = [PHASES[phase] for phase in of]
        total = float(communication[numbers].sum())
        return None if total <= 0 else min(1.0, max(0.0, 1.0 - float(overlapped[numbers].sum()) / total))

    whole = share(StepPhase.IDS, StepPhase.ROWS, StepPhase.PUSH, StepPhase.SYNC)
    parts = (share(StepPhase.IDS, StepPhase.ROWS), share(StepPhase.PUSH), share(StepPhase.SYNC))
    forward, backward, sync = (part if part is not None else whole if whole is not None else 1.0 for part in parts)
    return Exposed(forward, backward, sync, max(0.0, phases.cover_seconds))


def min_share(exposed: Exposed) -> float:
    return min(exposed.forward, exposed.backward, exposed.sync)


def differs(known: Exposed, measured: Exposed) -> bool:
    """Return whether prices change by more than noise."""
    shares = zip(
        (known.forward, known.backward, known.sync), (measured.forward, measured.backward, measured.sync), strict=True
    )
    if any(abs(a - b) > _SHARE_CHANGE for a, b in shares):
        return True
    hidden = min_share(measured) < 1.0
    larger = max(known.cover_seconds, measured.cover_seconds)
    return hidden and (math.isinf(larger) or abs(known.cover_seconds - measured.cover_seconds) > _COVER_CHANGE * larger)


def priced_by(cluster: Cluster, measured: Exposed | None) -> Cluster:
    """Return the cluster with measured exposure instead of that of its file, named in its name."""
    if measured is None or (min_share(measured) >= 1.0 and min_share(cluster.exposed) >= 1.0):
        return cluster
    shares = (measured.forward, measured.backward, measured.sync)
    if min_share(measured) >= 1.0:
        message = "nothing runs beside compute"
    else:
        of_shares = ", ".join(
            f"{name} {share:.2f}" for name, share in zip(("forward", "backward", "sync"), shares, strict=True)
        )
        message = f"outside compute {of_shares}; {1e3 * measured.cover_seconds:.3g} ms cover the rest"
    return cluster.with_exposed(measured, f"{cluster.name} (measured: {message})")


Float64Array = npt.NDArray[np.float64]

RECENT_STEPS = 50
"""Averages of a rank cover about this number of its newest steps."""
PHASES = {phase.value: number for number, phase in enumerate(StepPhase)}


def phase_values(report: StepReport) -> Float64Array:
    """Return float64[phase, quantity] sums of a report, phases as in ``StepPhase``, quantities as in
    ``PHASE_QUANTITIES``; unknown phases are left out."""
    values = np.zeros((len(PHASES), len(PHASE_QUANTITIES)))
    for phase in report.phases:
        if phase.phase in PHASES:
            values[PHASES[phase.phase]] = [getattr(phase, name) for name in PHASE_QUANTITIES]
    return values


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
        values = phase_values(report) / report.phase_steps
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
