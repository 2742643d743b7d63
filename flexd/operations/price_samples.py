"""Collectives of training steps as ranks report them, beside what the cluster's curves predict for their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from flexd.control.protocol.report import PHASE_QUANTITIES, StepPhase, StepReport
from flexd.core.layout import RankLayout
from flexd.planner.model.price_correction import PriceSample, join_samples
from flexd.topology.cluster import Cluster, Collective, CollectiveCurve, Link

Float64Array = npt.NDArray[np.float64]

_PHASES = {phase.value: number for number, phase in enumerate(StepPhase)}
_IDS, _ROWS, _PUSH, _SYNC = (
    _PHASES[phase] for phase in (StepPhase.IDS, StepPhase.ROWS, StepPhase.PUSH, StepPhase.SYNC)
)
_QUANTITIES = {name: number for number, name in enumerate(PHASE_QUANTITIES)}


class PricedCurve(StrEnum):
    """The curves that steps show."""

    INTRA_ALL_TO_ALL = "intra_all_to_all"
    INTER_ALL_TO_ALL = "inter_all_to_all"
    """Over the rail, or over all ranks in a direct exchange that the cluster has no curve for."""
    WORLD_ALL_TO_ALL = "world_all_to_all"
    """Over all ranks."""
    INTER_ALL_REDUCE = "inter_all_reduce"


def phase_values(report: StepReport) -> Float64Array:
    """Return float64[phase, quantity] sums of a report, phases as in ``StepPhase``, quantities as in
    ``PHASE_QUANTITIES``; unknown phases are left out."""
    values = np.zeros((len(_PHASES), len(PHASE_QUANTITIES)))
    for phase in report.phases:
        if phase.phase in _PHASES:
            values[_PHASES[phase.phase]] = [getattr(phase, name) for name in PHASE_QUANTITIES]
    return values


def price_samples(
    values: Float64Array, layout: RankLayout, cluster: Cluster, exchange: str, *, all_reduces: bool
) -> dict[PricedCurve, PriceSample]:
    """Return what ranks measured for each curve that their exchange uses.

    A collective takes as long as for the rank of its group that waits least: the others wait for that one too, which is
    no price of the link. Its bytes are those of the group's busiest rank. Sums over steps give the least only
    where the same rank is late in all of them; where ranks take turns they lie above it.

    Args:
        values: float64[rank, phase, quantity] of a mean step.
        cluster: as a job of this layout uses it (``Cluster.of_layout``).
        exchange: as ranks report it (``chain``, ``direct``, ``direct_no_dedup``).
        all_reduces: gradients of copies are all-reduced between nodes.
    """
    nodes = [layout.node_ranks(node) for node in range(layout.nodes)]
    rails = [layout.rail_ranks(local) for local in range(layout.local_ranks)]
    found: dict[PricedCurve, PriceSample] = {}

    def add(curve: PricedCurve, *samples: PriceSample) -> None:
        found[curve] = join_samples(samples)

    if exchange != "chain":
        everyone = [list(range(layout.world_size))]
        if layout.nodes == 1:
            priced = cluster.curve(Link.INTRA_NODE, Collective.ALL_TO_ALL)
            add(PricedCurve.INTRA_ALL_TO_ALL, _all_to_alls(values, everyone, "intra", priced))
        elif cluster.world is not None:
            add(PricedCurve.WORLD_ALL_TO_ALL, _all_to_alls(values, everyone, "inter", cluster.world.all_to_all))
        else:
            priced = cluster.curve(Link.INTER_NODE, Collective.ALL_TO_ALL)
            add(PricedCurve.INTER_ALL_TO_ALL, _all_to_alls(values, everyone, "inter", priced))
        return found
    if layout.local_ranks > 1:
        priced = cluster.curve(Link.INTRA_NODE, Collective.ALL_TO_ALL)
        sums = _one_phase(values, nodes, "intra", priced, _SYNC)
        add(PricedCurve.INTRA_ALL_TO_ALL, _all_to_alls(values, nodes, "intra", priced), sums)
    if layout.nodes > 1:
        priced = cluster.curve(Link.INTER_NODE, Collective.ALL_TO_ALL)
        add(PricedCurve.INTER_ALL_TO_ALL, _all_to_alls(values, rails, "inter", priced))
        # More than one collective a step: bits that travel on their own, which are no all-reduce.
        collectives = values[:, _SYNC, _QUANTITIES["inter_collectives"]]
        if all_reduces and 0 < collectives.max() <= 1:
            priced = cluster.curve(Link.INTER_NODE, Collective.ALL_REDUCE)
            add(PricedCurve.INTER_ALL_REDUCE, _one_phase(values, rails, "inter", priced, _SYNC))
    return found


def _all_to_alls(
    values: Float64Array, groups: Sequence[Sequence[int]], link: str, curve: CollectiveCurve
) -> PriceSample:
    """The phases of an exchange. Sizes travel with the ids' phase in collectives of their own: a message of ids has the
    bytes of that phase over the messages of rows."""
    rows = _mean_over_groups(values[:, _ROWS, _QUANTITIES[f"{link}_collectives"]], groups, np.max)
    return join_samples(
        [
            _one_phase(values, groups, link, curve, _IDS, messages=rows),
            _one_phase(values, groups, link, curve, _ROWS),
            _one_phase(values, groups, link, curve, _PUSH),
        ]
    )


def _one_phase(
    values: Float64Array,
    groups: Sequence[Sequence[int]],
    link: str,
    curve: CollectiveCurve,
    phase: int,
    messages: float = 0.0,
) -> PriceSample:
    seconds, sent, collectives = (
        values[:, phase, _QUANTITIES[f"{link}_{what}"]] for what in ("seconds", "bytes", "collectives")
    )
    number = _mean_over_groups(collectives, groups, np.max)
    busiest = _mean_over_groups(sent, groups, np.max)
    transfer = busiest * curve.seconds_per_byte(busiest / max(messages or number, 1e-9)) if number > 0 else 0.0
    measured = _mean_over_groups(seconds, groups, np.min) if number > 0 else 0.0
    return PriceSample(np.array([number * curve.latency_seconds]), np.array([transfer]), np.array([max(0.0, measured)]))


def _mean_over_groups(
    of_ranks: Float64Array, groups: Iterable[Sequence[int]], within: Callable[[Float64Array], np.float64]
) -> float:
    return float(np.mean([within(of_ranks[list(group)]) for group in groups]))


def corrected_cluster(cluster: Cluster, factors: Mapping[PricedCurve, tuple[float, float]]) -> Cluster:
    """Return the cluster with (latency, transfer) factors applied to its curves.

    Collectives of a link that steps have not shown take the factors of its all-to-all: what changes a link changes all
    of them, and a plan compares one with another. Correcting one alone would make the others look cheap.
    """
    if not factors:
        return cluster
    same = (1.0, 1.0)
    intra = factors.get(PricedCurve.INTRA_ALL_TO_ALL, same)
    rail = factors.get(PricedCurve.INTER_ALL_TO_ALL, factors.get(PricedCurve.WORLD_ALL_TO_ALL, same))
    world = factors.get(PricedCurve.WORLD_ALL_TO_ALL, rail)
    reduce = factors.get(PricedCurve.INTER_ALL_REDUCE, rail)
    return cluster.scale_seconds(
        {
            (Link.INTRA_NODE, Collective.ALL_TO_ALL): intra,
            (Link.INTRA_NODE, Collective.ALL_REDUCE): intra,
            (Link.INTRA_NODE, Collective.ALL_GATHER): intra,
            (Link.INTER_NODE, Collective.ALL_TO_ALL): rail,
            (Link.INTER_NODE, Collective.ALL_REDUCE): reduce,
            (Link.INTER_NODE, Collective.ALL_GATHER): rail,
        },
        world,
    )
