"""What the ranks report of their steps, summed for metrics and averaged for the planner."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from flexd.control.report import StepReport
from flexd.server.figures import LINKS, TRAFFIC_KINDS, TrainingFigures

_RECENT_STEPS = 50
"""The lookups of a step are averaged over about so many of a rank's newest steps."""


@dataclass
class _Rank:
    accesses_per_step: float
    version: int
    digest: int
    heard_at: float


class TrainingMonitor:
    """Thread-safe. Totals run since the daemon started; the averages are of the present topology generation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: dict[int, _Rank] = {}
        self._totals = TrainingFigures(sent_bytes={(kind, link): 0 for kind in TRAFFIC_KINDS for link in LINKS})

    def add(self, rank: int, report: StepReport) -> None:
        """Takes one report in. Lookups of a rank are summed over tiers and averaged with exponential weights."""
        with self._lock:
            per_step = sum(report.accesses_by_tier) / max(1, report.steps)
            known = self._ranks.get(rank)
            if known is not None:
                weight = min(1.0, report.steps / _RECENT_STEPS)
                per_step = known.accesses_per_step + weight * (per_step - known.accesses_per_step)
            self._ranks[rank] = _Rank(per_step, report.placement_version, report.placement_digest, time.monotonic())
            old = self._totals
            self._totals = TrainingFigures(
                accesses_by_tier=(
                    old.accesses_by_tier[0] + report.accesses_by_tier[0],
                    old.accesses_by_tier[1] + report.accesses_by_tier[1],
                    old.accesses_by_tier[2] + report.accesses_by_tier[2],
                ),
                sent_bytes={
                    (kind, link): sent + int(getattr(report, f"{kind}_{link}_bytes"))
                    for (kind, link), sent in old.sent_bytes.items()
                },
                steps=old.steps + report.steps,
                step_seconds=old.step_seconds + report.step_seconds,
                apply_seconds=old.apply_seconds + report.apply_seconds,
                newest_step=max(old.newest_step, report.step),
            )

    def new_generation(self) -> None:
        """Other ranks are there now: what the old ones averaged no longer holds."""
        with self._lock:
            self._ranks.clear()

    def accesses_per_step(self, world_size: int) -> float | None:
        """Lookups of the whole job in one step; None until any rank has reported.

        Ranks that have not reported yet are taken to do what the others do.
        """
        with self._lock:
            if not self._ranks:
                return None
            return world_size * sum(rank.accesses_per_step for rank in self._ranks.values()) / len(self._ranks)

    def versions(self) -> dict[int, int]:
        """Placement version by rank, as each reported it last."""
        with self._lock:
            return {rank: known.version for rank, known in sorted(self._ranks.items())}

    def figures(self) -> TrainingFigures:
        with self._lock:
            return self._totals
