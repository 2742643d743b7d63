"""The Lagrangian relaxation of the slots: price of a slot, and an upper bound of the gain."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_BISECTIONS = 48


def best_price(
    node: Float64Array,
    device: Float64Array,
    node_slots: float,
    device_slots: float,
    slots: float,
    budget: Int64Array | None = None,
    budgets: Float64Array | None = None,
) -> tuple[float, Float64Array, float]:
    """(price of a slot at which the slots of all ranks together are just used, price of a slot of each table with a
    budget, the most that any tiers within the slots gain).

    At any price m, every row takes the tier of the largest gain - m x slots; the sum of those plus m x all slots is at
    least what any tiers within the slots gain. A table with a budget of its own has a second multiplier on top. Fewer
    slots are taken at a higher price, so the least second multiplier that keeps the budget makes the table's price
    max(m, its price if it were alone).

    Args:
        node, device: float64[n] gains; -inf where the tier is not allowed.
        node_slots, device_slots: slots one row takes on all ranks together.
        slots: of all ranks together.
        budget: int64[n], index into ``budgets`` of the row's table, or -1.
        budgets: float64[b], slots of each table on all ranks together.
    """
    if budget is None or budgets is None or not len(budgets):
        price, dual = _price(node, device, node_slots, device_slots, slots)
        return price, np.empty(0), dual
    alone = np.array(
        [
            _price(node[budget == i], device[budget == i], node_slots, device_slots, limit)[0]
            for i, limit in enumerate(budgets.tolist())
        ]
    )
    floor = np.where(budget >= 0, alone[np.maximum(budget, 0)], 0.0)
    price, dual = _price(node, device, node_slots, device_slots, slots, floor, alone, budgets)
    return price, np.maximum(alone, price), dual


def _price(
    node: Float64Array,
    device: Float64Array,
    node_slots: float,
    device_slots: float,
    slots: float,
    floor: Float64Array | float = 0.0,
    alone: Float64Array | None = None,
    budgets: Float64Array | None = None,
) -> tuple[float, float]:
    wanted = (node > 0) | (device > 0)
    node, device = node[wanted], device[wanted]
    if not len(node):
        return 0.0, 0.0
    if isinstance(floor, np.ndarray):
        floor = floor[wanted]

    def relaxed(price: float) -> tuple[float, float]:
        paid = np.maximum(floor, price)
        at_node, at_device = node - paid * node_slots, device - paid * device_slots
        best = np.maximum(at_node, at_device)
        replicated = best > 0
        devices = np.count_nonzero(replicated & (at_device > at_node))
        nodes = np.count_nonzero(replicated) - devices
        gain = float(best.sum(where=replicated)) + price * slots
        if alone is not None and budgets is not None:
            gain += float(np.maximum(alone - price, 0.0) @ budgets)
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
