"""The cluster that prices plans now: its curves corrected by what steps report, with the exposure that they report."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from flexd.config.planner import PlannerConfig
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.control.protocol.report import StepReport
from flexd.control.protocol.trainer_settings import TrainerSettings
from flexd.core.keyspace import KeySpace
from flexd.operations.measured_exposure import priced_by
from flexd.operations.plan_settings import settings_of_job
from flexd.operations.price_samples import (
    Float64Array,
    PricedCurve,
    corrected_cluster,
    phase_values,
    price_samples,
)
from flexd.planner.model.price_correction import MIN_REPORTS, Correction, PriceCorrection
from flexd.topology.cluster import Cluster, Exposed

MIN_STEPS, MIN_SECONDS = 8, 1.0
"""What is learnt from at once has at least so many steps of every rank, and so much of their time."""
STALE_REPORTS = 100
"""A curve that so many newer reports did not show takes the factors of its link again."""
_WORDS = {
    PricedCurve.INTRA_ALL_TO_ALL: "all-to-all in nodes",
    PricedCurve.INTER_ALL_TO_ALL: "all-to-all between nodes",
    PricedCurve.WORLD_ALL_TO_ALL: "all-to-all over all ranks",
    PricedCurve.INTER_ALL_REDUCE: "all-reduce between nodes",
}


class MeasuredExposure(Protocol):
    """The part of the training monitor that prices use."""

    def exposed(self) -> Exposed | None:
        """Return the measured exposure of the communication; None if not known."""
        ...


class LiveRanks(Protocol):
    """The part of the coordinator that prices use."""

    def live(self) -> LiveTopology | None: ...


class _RankSums:
    """Steps of one rank that were not learnt from yet."""

    def __init__(self, exchange: str) -> None:
        self.values: Float64Array = np.zeros(())
        self.steps = 0
        self.seconds = 0.0
        self.exchange = exchange


class LivePrices:
    """Thread-safe. What was learnt holds for one topology generation and is not saved: it is learnt again within
    ``MIN_REPORTS`` times the larger of ``MIN_STEPS`` and ``MIN_SECONDS``, and after a restart links may be others.

    Corrections are learnt and reported in any case, and used with ``planner.correct_prices``.

    Args:
        cluster: of the topology file or preset.
        training: measures the exposure.
        ranks: the coordinator, which knows the live ranks.
    """

    def __init__(
        self,
        settings: PlannerConfig,
        keyspace: KeySpace,
        cluster: Cluster,
        training: MeasuredExposure,
        ranks: LiveRanks,
    ) -> None:
        self._settings = settings
        self._keyspace = keyspace
        self._probed = cluster
        self._training = training
        self._live = ranks
        self._generation = -1
        self._lock = threading.Lock()
        self._ranks: dict[int, _RankSums] = {}
        self._corrections: dict[PricedCurve, PriceCorrection] = {}
        self._last_shown: dict[PricedCurve, int] = {}
        self._learnt = 0

    def apply_config(self, settings: PlannerConfig) -> None:
        """Use other settings from the next plan on."""
        self._settings = settings

    @property
    def used(self) -> bool:
        """True if plans are priced with corrections."""
        return self._settings.correct_prices

    @property
    def cluster(self) -> Cluster:
        """The cluster that prices plans, whose name says what was corrected and measured."""
        return priced_by(self._corrected() if self.used else self._probed, self._training.exposed())

    def corrections(self) -> dict[PricedCurve, PriceCorrection]:
        """Return what was learnt of each curve that steps of this generation have shown."""
        with self._lock:
            return dict(sorted(self._corrections.items()))

    def add(self, rank: int, report: StepReport) -> None:
        """Add the steps of one report; learn once every rank has enough of them."""
        if report.phase_steps < 1:
            return
        live = self._live.live()
        if live is None or not 0 <= rank < live.layout.world_size:
            return
        layout = live.layout
        with self._lock:
            if live.generation != self._generation:
                self._forget(live.generation)
            sums = self._ranks.setdefault(rank, _RankSums(report.exchange))
            if report.exchange != sums.exchange:
                # Steps of two exchanges may be in this report.
                self._ranks[rank] = _RankSums(report.exchange)
                return
            sums.values = sums.values + phase_values(report)
            sums.steps += report.phase_steps
            sums.seconds += report.step_seconds
            if len(self._ranks) == layout.world_size and all(
                one.steps >= MIN_STEPS and one.seconds >= MIN_SECONDS for one in self._ranks.values()
            ):
                self._learn(live)

    def _forget(self, generation: int) -> None:
        """Forget everything learnt: groups of other sizes, perhaps over other links."""
        self._generation = generation
        self._ranks.clear()
        self._corrections.clear()
        self._last_shown.clear()
        self._learnt = 0

    def _learn(self, live: LiveTopology) -> None:
        layout = live.layout
        exchanges = {one.exchange for one in self._ranks.values()}
        values = np.stack([self._ranks[rank].values / self._ranks[rank].steps for rank in range(layout.world_size)])
        self._ranks = {rank: _RankSums(sums.exchange) for rank, sums in self._ranks.items()}
        if len(exchanges) != 1:
            return
        self._learnt += 1
        samples = price_samples(
            values, layout, self._probed.of_layout(layout.nodes, layout.local_ranks), exchanges.pop(),
            all_reduces=self._all_reduces(live.trainer),
        )  # fmt: skip
        for curve, sample in samples.items():
            self._corrections[curve] = self._corrections.get(curve, PriceCorrection()).learn(sample)
            self._last_shown[curve] = self._learnt

    def _all_reduces(self, trainer: TrainerSettings | None) -> bool:
        """Return whether gradients of copies are all-reduced between nodes: those of no table travel rounded."""
        wire = settings_of_job(self._settings, trainer, self._keyspace.tables).comm_dtype
        return not any((wire or table.dtype) in ("float16", "bfloat16") for table in self._keyspace.tables)

    def _corrected(self) -> Cluster:
        with self._lock:
            known = {
                curve: correction
                for curve, correction in sorted(self._corrections.items())
                if correction.reports >= MIN_REPORTS and self._learnt - self._last_shown[curve] < STALE_REPORTS
            }
        if all(correction.correction is Correction.PROBED for correction in known.values()):
            return self._probed
        corrected = corrected_cluster(self._probed, {curve: known[curve].factors for curve in known})
        return replace(corrected, name=f"{self._probed.name} (corrected: {_names(known)})")


def _names(known: Mapping[PricedCurve, PriceCorrection]) -> str:
    return ", ".join(
        f"{_WORDS[curve]} {_factors(correction)}"
        for curve, correction in known.items()
        if correction.correction is not Correction.PROBED
    )


def _factors(correction: PriceCorrection) -> str:
    latency, transfer = correction.factors
    return f"x{transfer:.2f}" if latency == transfer else f"latency x{latency:.2f}, bytes x{transfer:.2f}"
