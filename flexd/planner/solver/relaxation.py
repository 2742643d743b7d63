"""The Lagrangian relaxation of the slots: price of a slot, and an upper bound of the gain."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]

_BISECTIONS = 48


def best_price(
    node: Float64Array, device: Float64Array, node_slots: float, device_slots: float, slots: float
) -> tuple[float, float]:
    """(price of a slot at which the slots of all ranks together are just used, the most that any tiers within the slots
    gain).

    At any price m, every row takes the tier of the largest gain - m x slots; the sum of those plus m x all slots is at
    least what any tiers within the slots gain.

    Args:
        node, device: float64[n] gains; -inf where the tier is not allowed.
        node_slots, device_slots: slots one row takes on all ranks together.
        slots: of all ranks together.
    """
    wanted = (node > 0) | (device > 0)
    node, device = node[wanted], device[wanted]
    if not len(node):
        return 0.0, 0.0

    def relaxed(price: float) -> tuple[float, float]:
        at_node, at_device = node - price * node_slots, device - price * device_slots
        best = np.maximum(at_node, at_device)
        replicated = best > 0
        devices = np.count_nonzero(replicated & (at_device > at_node))
        nodes = np.count_nonzero(replicated) - devices
        gain = float(best.sum(where=replicated)) + price * slots
        return gain, node_slots * nodes + device_slots * devices

    dual, used = relaxed(0.0)
    if used <= slots:
        return 0.0, dual
    low, high = 0.0, _max_price(node, node_slots, device, device_slots)
    middle = high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        value, used = relaxed(middle)
        dual = min(dual, value)
        low, high = (middle, high) if used > slots else (low, middle)
        if high - low <= 1e-9 * high or used == slots:
            break
    return (middle if used == slots else high), dual


def _max_price(node: Float64Array, node_slots: float, device: Float64Array, device_slots: float) -> float:
    """Return the highest possible price of a slot."""
    at_node = float(node.max()) / node_slots if node_slots > 0 else 0.0
    return max(at_node, float(device.max()) / device_slots, 0.0)


def single_tier_bound(gains: Float64Array, rows: float) -> float:
    """The most that ``rows`` rows at one tier gain; the last may be a fraction of a row."""
    gains = gains[gains > 0]
    if rows >= len(gains):
        return float(gains.sum())
    whole = int(rows)
    best = np.partition(gains, len(gains) - whole - 1)[len(gains) - whole - 1 :]
    return float(best[1:].sum() + (rows - whole) * best[0])


_ROUNDING = 1e-12


def missed_share(objective_seconds: float, home_seconds: float, lower_bound_seconds: float) -> float:
    """Return what may be missed of the largest possible saving, 0 to 1; 0 where nothing can be saved."""
    missed, possible = max(0.0, objective_seconds - lower_bound_seconds), home_seconds - lower_bound_seconds
    # Below the rounding of the sums.
    return min(1.0, missed / possible) if possible > _ROUNDING * home_seconds else 0.0
