"""The division of fast memory that a plan proposes, beside the one that ranks have now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout, Tier
from flexd.planner.memory.division import FastMemoryDivision, divide, priced
from flexd.planner.memory.miss_curve import MissCurve
from flexd.planner.memory.slot_curve import SlotCurve
from flexd.planner.model.cost import CostBreakdown, LoadSums, step_latencies
from flexd.planner.model.gains import row_seconds, usable_tiers
from flexd.planner.model.prices import exposed_share
from flexd.planner.model.row_bytes import Exchange
from flexd.topology.cluster import Cluster

Float64Array = npt.NDArray[np.float64]


LEAST_GAIN = 0.05
"""Share of the predicted misses that a new division must save: ranks copy their frames for it."""


@dataclass(frozen=True)
class FastMemoryNow:
    """Fast memory of the ranks, as they report it.

    Attributes:
        frames: home rows that fit, by dim-group.
        miss_seconds: measured wait a miss; NaN before there was one: then only misses are compared.
        measured_misses: float64[groups], a step and rank; NaN where not known.
    """

    frames: tuple[int, ...]
    miss_seconds: float
    measured_misses: Float64Array


@dataclass(frozen=True)
class FastMemoryProposal:
    """Divisions of the bytes that frames take now.

    Attributes:
        now: the frames that ranks have, as the curves price them. Its bytes are the budget.
        planned: the best frames of these bytes.
        joint: the best frames and replica slots of these bytes and those of the replica slots that ranks have; None
            without a price of a miss. Slots are allocated when training starts.
        measured_misses: float64[groups], a step and rank; NaN where not known.
        miss_seconds: NaN if it is not known.
        home_rows: int64[groups], most of any rank.
        slots: of a rank, as they are now.
        frame_bytes: int64[groups], of one frame.
    """

    now: FastMemoryDivision
    planned: FastMemoryDivision
    joint: FastMemoryDivision | None
    measured_misses: Float64Array
    miss_seconds: float
    home_rows: npt.NDArray[np.int64]
    slots: tuple[int, ...]
    frame_bytes: npt.NDArray[np.int64]

    @property
    def frame_weights(self) -> tuple[float, ...]:
        """Bytes of the planned frames by dim-group; empty where they miss hardly less than the present ones."""
        if self.planned.misses.sum() > (1 - LEAST_GAIN) * self.now.misses.sum() or not self.now.misses.any():
            return ()
        return tuple((self.planned.frames * self.frame_bytes).astype(float).tolist())

    def to_dict(self) -> dict[str, Any]:
        """Return everything JSON-able; None for what is not known."""
        known = bool(np.isfinite(self.miss_seconds))

        def seconds(division: FastMemoryDivision) -> float | None:
            return division.stall_seconds if known else None

        return {
            "budget_bytes": self.now.used_bytes,
            "miss_seconds": self.miss_seconds if known else None,
            "stall_seconds": seconds(self.now),
            "planned_stall_seconds": seconds(self.planned),
            "seconds_per_byte": self.planned.seconds_per_byte if known else None,
            "groups": [
                {
                    "home_rows": int(self.home_rows[i]),
                    "frames": int(self.now.frames[i]),
                    "planned_frames": int(self.planned.frames[i]),
                    "misses": float(self.now.misses[i]),
                    "measured_misses": _finite(self.measured_misses[i]),
                    "planned_misses": float(self.planned.misses[i]),
                    "slots": self.slots[i],
                    "joint_frames": None if self.joint is None else int(self.joint.frames[i]),
                    "joint_slots": None if self.joint is None else int(self.joint.slots[i]),
                }
                for i in range(len(self.home_rows))
            ],
        }


def propose(
    now: FastMemoryNow,
    sums: Sequence[LoadSums],
    keyspace: KeySpace,
    cluster: Cluster,
    exchange: Exchange,
    sizes: Float64Array,
    slots: Sequence[int],
) -> FastMemoryProposal:
    """Divide the bytes of the frames that ranks have now anew.

    Args:
        sums: of all dim-groups, in their order.
        sizes: float64[3, 6, 3] bytes by (tier, phase, link), ``message_sizes``: at which copies are priced.
        slots: replica slots of a rank by dim-group.
    """
    layout = sums[0].layout
    curves = [MissCurve.of(each.load, layout, keyspace.groups[each.load.group].rows) for each in sums]
    none = np.zeros(len(curves), dtype=np.int64)
    home_rows = np.array([curve.home_rows for curve in curves], dtype=np.int64)
    frames = np.minimum(np.array(now.frames, dtype=np.int64), home_rows)
    price = now.miss_seconds if now.miss_seconds > 0 else 1.0
    prices = np.full(len(curves), price)
    present = priced(frames, none, curves, [], prices)
    planned = divide(curves, present.used_bytes, price)
    if planned.seconds >= present.seconds:
        planned = present
    joint = None
    if now.miss_seconds > 0:
        slot_curves = [_slot_curve(each, layout, cluster, exchange, sizes) for each in sums]
        budget = present.used_bytes + sum(
            curve.slot_bytes * count for curve, count in zip(slot_curves, slots, strict=True)
        )
        joint = divide(
            curves, budget, price, slot_curves, replica_latency_seconds=_latency(sums, layout, cluster, exchange)
        )
    return FastMemoryProposal(
        present, planned, joint, now.measured_misses, now.miss_seconds, home_rows, tuple(slots),
        np.array([curve.frame_bytes for curve in curves], dtype=np.int64),
    )  # fmt: skip


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def message_sizes(cost: CostBreakdown, without_copies: CostBreakdown) -> Float64Array:
    """Return float64[3, 6, 3] bytes by (tier, phase, link) at which rows are priced one by one.

    A tier that is not in use has no message; it is priced as if one of the exchange's size went there.
    """
    sent = cost.bytes.copy()
    largest = without_copies.bytes.sum(axis=0)
    for tier in (Tier.NODE, Tier.DEVICE):
        sent[tier][sent[tier] == 0] = largest.max(initial=0.0)
    return sent


def _slot_curve(
    sums: LoadSums, layout: RankLayout, cluster: Cluster, exchange: Exchange, sizes: Float64Array
) -> SlotCurve:
    factors = row_seconds(sums.load, layout, cluster, sizes, exchange)
    gains = (factors[Tier.HOME] - factors) @ sums.listed
    return SlotCurve.of(gains, layout, exchange, sums.load.row_bytes + sums.load.state_bytes)


def _latency(sums: Sequence[LoadSums], layout: RankLayout, cluster: Cluster, exchange: Exchange) -> float:
    """Return the exposed seconds a step that synchronising copies at all usable tiers takes."""
    used = {int(tier) for tier in usable_tiers(layout, exchange)}
    with_sync, without = (step_latencies(sums, cluster, exchange, tiers) for tiers in (used, set[int]()))
    return float(exposed_share(cluster) @ (with_sync - without).sum(axis=1))
