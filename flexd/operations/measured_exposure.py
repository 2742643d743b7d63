"""The communication that compute covers, as ranks report it, for the prices of plans."""

from __future__ import annotations

import math

from flexd.control.protocol.report import StepPhase
from flexd.operations.phase_averages import PhaseAverages
from flexd.topology.cluster import Cluster, Exposed

_SHARE_CHANGE, _COVER_CHANGE = 0.05, 0.1
"""Smaller changes are noise; plans made at other prices are hard to compare."""
_PHASES = tuple(StepPhase)


def exposure(phases: PhaseAverages) -> Exposed:
    """Return the share of each part of the communication that did not run beside the training thread, and the compute
    that can cover the rest. Without collectives of a part its share is that of the whole."""
    communication = phases.quantity("intra_seconds") + phases.quantity("inter_seconds")
    overlapped = phases.quantity("overlapped_seconds")

    def share(*of: StepPhase) -> float | None:
        numbers = [_PHASES.index(phase) for phase in of]
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
        words = "nothing runs beside compute"
    else:
        of_shares = ", ".join(
            f"{name} {share:.2f}" for name, share in zip(("forward", "backward", "sync"), shares, strict=True)
        )
        words = f"outside compute {of_shares}; {1e3 * measured.cover_seconds:.3g} ms cover the rest"
    return cluster.with_exposed(measured, f"{cluster.name} (measured: {words})")
