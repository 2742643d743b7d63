"""The cluster that prices plans now: its curves corrected by what steps report, with the exposure that they report."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Protocol

import numpy as np

from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.control.protocol.report import StepReport
from flexd.operations.measured_exposure import priced_by
from flexd.operations.price_samples import Float64Array, phase_values, price_samples
from flexd.planner.model.price_correction import PriceCorrection
from flexd.topology.cluster import Cluster, Exposed, Link

MIN_STEPS, MIN_SECONDS = 8, 1.0
"""What is learnt from at once has at least so many steps of every rank, and so much of their time."""
LINK_WORDS = {Link.INTRA_NODE: "in nodes", Link.INTER_NODE: "between nodes"}


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

    Args:
        cluster: of the topology file or preset.
        training: measures the exposure.
        ranks: the coordinator, which knows the live ranks.
    """

    def __init__(self, cluster: Cluster, training: MeasuredExposure, ranks: LiveRanks) -> None:
        self._probed = cluster
        self._training = training
        self._live = ranks
        self._generation = -1
        self._lock = threading.Lock()
        self._ranks: dict[int, _RankSums] = {}
        self._corrections: dict[Link, PriceCorrection] = {}

    @property
    def cluster(self) -> Cluster:
        """The cluster that prices plans, whose name says what was corrected and measured."""
        return priced_by(self._corrected(), self._training.exposed())

    def corrections(self) -> dict[Link, PriceCorrection]:
        """Return what was learnt of each link that steps of this generation have shown."""
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

    def _learn(self, live: LiveTopology) -> None:
        layout = live.layout
        exchanges = {one.exchange for one in self._ranks.values()}
        values = np.stack([self._ranks[rank].values / self._ranks[rank].steps for rank in range(layout.world_size)])
        self._ranks = {rank: _RankSums(sums.exchange) for rank, sums in self._ranks.items()}
        if len(exchanges) != 1:
            return
        cluster = self._probed.of_layout(layout.nodes, layout.local_ranks)
        for link, sample in price_samples(values, layout, cluster, exchanges.pop()).items():
            self._corrections[link] = self._corrections.get(link, PriceCorrection()).learn(*sample)

    def _corrected(self) -> Cluster:
        factors = {link: learnt.factor for link, learnt in self.corrections().items() if learnt.used}
        if not factors:
            return self._probed
        names = ", ".join(f"{LINK_WORDS[link]} x{factor:.2f}" for link, factor in factors.items())
        return replace(self._probed.scale_seconds(factors), name=f"{self._probed.name} (corrected: {names})")
