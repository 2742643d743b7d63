"""Collectives of training steps as ranks report them, beside what the cluster's curves predict for their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.control.protocol.report import PHASE_QUANTITIES, StepPhase, StepReport
from flexd.core.layout import RankLayout
from flexd.topology.cluster import Cluster, Collective, CollectiveCurve, Link

Float64Array = npt.NDArray[np.float64]

_PHASES = {phase.value: number for number, phase in enumerate(StepPhase)}
_QUANTITIES = {name: number for number, name in enumerate(PHASE_QUANTITIES)}


def phase_values(report: StepReport) -> Float64Array:
    """Return float64[phase, quantity] sums of a report, phases as in ``StepPhase``, quantities as in
    ``PHASE_QUANTITIES``; unknown phases are left out."""
    values = np.zeros((len(_PHASES), len(PHASE_QUANTITIES)))
    for phase in report.phases:
        if phase.phase in _PHASES:
            values[_PHASES[phase.phase]] = [getattr(phase, name) for name in PHASE_QUANTITIES]
    return values


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
        of_ranks = values[:, _PHASES[phase], _QUANTITIES[f"{link}_{quantity}"]]
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
