"""Divide one budget of fast memory between the frames of dim-groups and replica slots, by one multiplier.

Every use of memory is a concave curve of seconds saved by bytes, so the best division gives each the bytes whose saving
is above one price a byte, the multiplier at which the budget is spent (Everett: Generalized Lagrange multiplier method,
Operations Research 11(3), 1963). The curves are made of straight segments: taken in the order of their slopes until the
bytes are spent they give that price exactly, without a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.errors import PlanError
from flexd.core.fast_memory import proportional_frames
from flexd.planner.memory.miss_curve import MissCurve
from flexd.planner.memory.slot_curve import SlotCurve

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FastMemoryDivision:
    """Frames and replica slots of a rank by dim-group, and what they are expected to do in a step.

    Attributes:
        frames: int64[g].
        slots: int64[g], replica slots.
        misses: float64[g], expected rows that a step reads from slow memory.
        stall_seconds: of these, at the price of a miss.
        saved_seconds: exposed communication that the replica slots save.
        used_bytes: at most the budget, except that every dim-group has a frame.
        seconds_per_byte: the multiplier: what one more byte would save.
    """

    frames: Int64Array
    slots: Int64Array
    misses: Float64Array
    stall_seconds: float
    saved_seconds: float
    used_bytes: int
    seconds_per_byte: float

    @property
    def seconds(self) -> float:
        """Stall less what the replicas save: what is minimised."""
        return self.stall_seconds - self.saved_seconds


def priced(
    frames: Int64Array,
    slots: Int64Array,
    curves: Sequence[MissCurve],
    slot_curves: Sequence[SlotCurve],
    miss_seconds: Float64Array,
    seconds_per_byte: float = 0.0,
    *,
    replica_latency_seconds: float = 0.0,
) -> FastMemoryDivision:
    """Return a given division with its prices."""
    misses = np.array([curve.misses(count) for curve, count in zip(curves, frames.tolist(), strict=True)])
    saved = sum(curve.saved_seconds(count) for curve, count in zip(slot_curves, slots.tolist(), strict=False))
    used = sum(curve.frame_bytes * count for curve, count in zip(curves, frames.tolist(), strict=True))
    used += sum(curve.slot_bytes * count for curve, count in zip(slot_curves, slots.tolist(), strict=False))
    return FastMemoryDivision(
        frames, slots, misses, float(misses @ miss_seconds), saved - replica_latency_seconds * bool(slots.any()), used,
        seconds_per_byte,
    )  # fmt: skip


def proportional(
    curves: Sequence[MissCurve], budget_bytes: float, miss_seconds: float | Sequence[float]
) -> FastMemoryDivision:
    """Return the frames in proportion to the rows of dim-groups, without replica slots: what ranks begin with."""
    frames = proportional_frames(
        budget_bytes, [curve.home_rows for curve in curves], [curve.frame_bytes for curve in curves]
    )
    none = np.zeros(len(curves), dtype=np.int64)
    return priced(np.array(frames, dtype=np.int64), none, curves, [], _of_groups(miss_seconds, curves))


def divide(
    curves: Sequence[MissCurve],
    budget_bytes: float,
    miss_seconds: float | Sequence[float],
    slot_curves: Sequence[SlotCurve] = (),
    *,
    replica_latency_seconds: float = 0.0,
) -> FastMemoryDivision:
    """Return the division that takes the least time by these curves.

    Bytes that would save nothing go to frames in proportion to the rows that are in none, in case the curves
    are wrong. Never worse, by its own price, than frames in proportion to rows without replica slots, where
    these keep to the budget: a frame for each dim-group can be more than their share.

    Args:
        curves: of each dim-group.
        budget_bytes: of frames and replica slots on a rank; with one that does not hold a frame for each dim-group,
            each has one.
        miss_seconds: price of a miss, one for all dim-groups or one each.
        slot_curves: of each dim-group; empty: replica slots are not part of the budget.
        replica_latency_seconds: what synchronising any replicas costs a step, saved if there are none.

    Raises:
        PlanError: a budget or a price that is negative or not a number, or curves of different numbers of dim-groups.
    """
    price = _of_groups(miss_seconds, curves)
    if not budget_bytes >= 0 or not np.isfinite(price).all() or bool((price < 0).any()):
        raise PlanError(
            f"{budget_bytes} bytes of fast memory, {miss_seconds} seconds a miss", remedy="give numbers of at least 0"
        )
    if len(slot_curves) not in (0, len(curves)):
        raise PlanError(f"{len(slot_curves)} curves of slots for {len(curves)} dim-groups", remedy="one each, or none")
    proposals = [_filled(curves, budget_bytes, price, ())]
    by_rows = proportional(curves, budget_bytes, price.tolist())
    if by_rows.used_bytes <= budget_bytes:
        proposals.insert(0, by_rows)
    if slot_curves:
        with_slots = _filled(curves, budget_bytes, price, slot_curves)
        proposals.append(
            priced(
                with_slots.frames,
                with_slots.slots,
                curves,
                slot_curves,
                price,
                with_slots.seconds_per_byte,
                replica_latency_seconds=replica_latency_seconds,
            )
        )
    # The later one of equals: a division by use knows what its next byte is worth.
    return min(reversed(proposals), key=lambda found: found.seconds)


def _filled(
    curves: Sequence[MissCurve], budget_bytes: float, price: Float64Array, slot_curves: Sequence[SlotCurve]
) -> FastMemoryDivision:
    """Fill the budget segment by segment; whole frames and slots, the rest frame by frame."""
    groups = len(curves)
    unit = np.array([curve.frame_bytes for curve in curves] + [curve.slot_bytes for curve in slot_curves], dtype=float)
    numbers, saved, consumer = [], [], []
    for index, curve in enumerate(curves):
        frames, misses = curve.segments()
        numbers.append(frames)
        saved.append(misses * price[index] / unit[index])
        consumer.append(np.full(len(frames), index))
    for index, slot_curve in enumerate(slot_curves, start=groups):
        numbers.append(slot_curve.slots)
        saved.append(slot_curve.seconds / slot_curve.slots / unit[index])
        consumer.append(np.full(len(slot_curve.slots), index))
    number, slope, of = np.concatenate(numbers), np.concatenate(saved), np.concatenate(consumer)
    worth = slope > 0
    order = np.flatnonzero(worth)[np.argsort(-slope[worth], kind="stable")]
    # Every dim-group has a frame, which its own best segment pays for first.
    least = float(unit[:groups].sum())
    size = number[order] * unit[of[order]]
    first = np.zeros(len(order))
    for index in range(groups):
        mine = np.flatnonzero(of[order] == index)
        held = np.minimum(np.cumsum(size[mine]), unit[index])
        first[mine] = np.diff(held, prepend=0.0)
    rest = max(0.0, budget_bytes - least)
    open_size = size - first
    ends = np.cumsum(open_size)
    taken = np.clip(rest - (ends - open_size), 0.0, open_size)
    multiplier = (
        float(slope[order][np.searchsorted(ends, rest, side="right")]) if len(ends) and rest < ends[-1] else 0.0
    )
    units = np.bincount(of[order], weights=first + taken, minlength=len(unit)) / unit
    whole = np.floor(units + 1e-9).astype(np.int64)
    whole[:groups] = np.maximum(whole[:groups], 1)
    most = np.array([curve.home_rows for curve in curves], dtype=np.int64)
    whole[:groups] = np.minimum(whole[:groups], most)
    left = budget_bytes - float(whole @ unit)
    left = _round_up(whole, unit, curves, price, left)
    left = _exchange(whole, unit, curves, price, left)
    _spread(whole[:groups], most, unit[:groups], left)
    slots = whole[groups:] if slot_curves else np.zeros(groups, dtype=np.int64)
    return priced(whole[:groups], slots, curves, slot_curves, price, multiplier)


def _round_up(
    whole: Int64Array, unit: Float64Array, curves: Sequence[MissCurve], price: Float64Array, left: float
) -> float:
    """Add single frames where they save most a byte, as long as one fits. In place; return the bytes left."""

    def worth(index: int) -> float:
        curve, count = curves[index], int(whole[index])
        saved = curve.misses(count) - curve.misses(count + 1) if count < curve.home_rows else 0.0
        return saved * float(price[index]) / curve.frame_bytes

    found = [worth(index) for index in range(len(curves))]
    for _ in range(2 * len(curves)):
        index = max(range(len(curves)), key=lambda at: found[at] if unit[at] <= left else 0.0)
        if found[index] <= 0 or unit[index] > left:
            break
        whole[index] += 1
        left -= float(unit[index])
        found[index] = worth(index)
    return left


def _exchange(
    whole: Int64Array, unit: Float64Array, curves: Sequence[MissCurve], price: Float64Array, left: float
) -> float:
    """Move single frames between dim-groups while that saves time: a curve may bend within a frame, so that rounding
    takes the wrong one. In place; return the bytes left."""
    groups = range(len(curves))

    def saved(index: int, count: int) -> float:
        """Return what the frame after the first ``count`` saves, in seconds."""
        curve = curves[index]
        return float((curve.misses(count) - curve.misses(count + 1)) * price[index])

    for _ in range(2 * len(curves)):
        more = [saved(index, int(whole[index])) if whole[index] < curves[index].home_rows else 0.0 for index in groups]
        # The last frame of a dim-group is not given away.
        less = [saved(index, int(whole[index]) - 1) if whole[index] > 1 else np.inf for index in groups]
        pairs = [
            (more[to] - less[of], of, to) for of in groups for to in groups if of != to and unit[to] <= left + unit[of]
        ]
        gain, of, to = max(pairs, default=(0.0, 0, 0))
        if gain <= 1e-12 * max(abs(more[to]), 1e-300):
            break
        whole[of] -= 1
        whole[to] += 1
        left += float(unit[of] - unit[to])
    return left


def _spread(frames: Int64Array, most: Int64Array, unit: Float64Array, left: float) -> None:
    """Add frames in proportion to the bytes of rows that are in none, within the bytes that are left. In place."""
    missing = most - frames
    whole = float(missing @ unit)
    if left > 0 and whole > 0:
        frames += np.floor(missing * min(1.0, left / whole)).astype(np.int64)


def _of_groups(miss_seconds: float | Sequence[float], curves: Sequence[MissCurve]) -> Float64Array:
    return np.broadcast_to(np.asarray(miss_seconds, dtype=np.float64), (len(curves),)).copy()
