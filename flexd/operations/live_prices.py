"""The cluster that prices plans now: its curves corrected by what steps report, with the exposure that they report."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.control.protocol.report import PHASE_QUANTITIES, StepPhase, StepReport
from flexd.core.layout import RankLayout
from flexd.operations.step_times import PHASES, phase_values, priced_by
from flexd.operations.training_monitor import TrainingMonitor
from flexd.planner.model.prices import PriceCorrection
from flexd.topology.cluster import Cluster, Collective, CollectiveCurve, Link

Float64Array = npt.NDArray[np.float64]


def price_samples(
    values: Float64Array, layout: RankLayout, cluster: Cluster, exchange: str
) -> dict[Link, tuple[float, float]]:
    """Return the (predicted, measured) seconds of a step's exchange for each link that it uses.

    A collective takes as long as for the rank of its group that waits least: the others wait for that one too, which is
    no price of the link. Its bytes are those of the group's busiest rank. Sums over steps give the least only
    where the same rank is late in all of them; where ranks take turns they lie above it.

    Args:
        values: float64[rank, phase, quantity] of a mean step.
        cluster: as a job of this layout uses it (``Cluster.of_layout``).
        exchange: as ranks report it (``chain``, ``direct``).
    """
    nodes = [layout.node_ranks(node) for node in range(layout.nodes)]
    rails = [layout.rail_ranks(local) for local in range(layout.local_ranks)]
    all_to_all = {link: cluster.curve(link, Collective.ALL_TO_ALL) for link in (Link.INTRA_NODE, Link.INTER_NODE)}
    if exchange != "chain":
        everyone = [list(range(layout.world_size))]
        if layout.nodes == 1:
            return {Link.INTRA_NODE: _exchange(values, everyone, "intra", all_to_all[Link.INTRA_NODE])}
        over_all = all_to_all[Link.INTER_NODE] if cluster.world is None else cluster.world.all_to_all
        return {Link.INTER_NODE: _exchange(values, everyone, "inter", over_all)}
    found = {}
    if layout.local_ranks > 1:
        found[Link.INTRA_NODE] = _exchange(values, nodes, "intra", all_to_all[Link.INTRA_NODE])
    if layout.nodes > 1:
        found[Link.INTER_NODE] = _exchange(values, rails, "inter", all_to_all[Link.INTER_NODE])
    return found


def _exchange(
    values: Float64Array, groups: Sequence[Sequence[int]], link: str, curve: CollectiveCurve
) -> tuple[float, float]:
    """Sizes travel with the ids' phase in collectives of their own: a message of ids has the bytes of that phase over
    the messages of rows."""

    def over_groups(phase: StepPhase, quantity: str, within: Any) -> float:
        of_ranks = values[:, PHASES[phase], PHASE_QUANTITIES.index(f"{link}_{quantity}")]
        return float(np.mean([within(of_ranks[list(group)]) for group in groups]))

    predicted = measured = 0.0
    row_messages = over_groups(StepPhase.ROWS, "collectives", np.max)
    for phase in (StepPhase.IDS, StepPhase.ROWS, StepPhase.PUSH):
        number = over_groups(phase, "collectives", np.max)
        if number <= 0:
            continue
        busiest = over_groups(phase, "bytes", np.max)
        messages = row_messages if phase is StepPhase.IDS and row_messages else number
        predicted += number * curve.latency_seconds + busiest * curve.seconds_per_byte(busiest / max(messages, 1e-9))
        measured += max(0.0, over_groups(phase, "seconds", np.min))
    return predicted, measured


MIN_STEPS, MIN_SECONDS = 8, 1.0
"""Reports that are learnt from at once have at least so many steps of every rank, and so much of their time."""
LINK_WORDS = {Link.INTRA_NODE: "in nodes", Link.INTER_NODE: "between nodes"}


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

    def __init__(self, cluster: Cluster, training: TrainingMonitor, ranks: Coordinator) -> None:
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
        if report.phases.steps < 1:
            return
        live = self._live.live()
        if live is None or not 0 <= rank < live.layout.world_size:
            return
        layout = live.layout
        with self._lock:
            if live.generation != self._generation:
                self._forget(live.generation)
            sums = self._ranks.setdefault(rank, _RankSums(report.exchange.name))
            if report.exchange.name != sums.exchange:
                # Steps of two exchanges may be in this report.
                self._ranks[rank] = _RankSums(report.exchange.name)
                return
            sums.values = sums.values + phase_values(report)
            sums.steps += report.phases.steps
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
