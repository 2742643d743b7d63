"""The memory of a rank for copies: one price of a byte for the rows of all dim-groups, and what each of them gets.

Rows of other dim-groups have other sizes, so a slot is no measure between them. The Lagrangian relaxation of the bytes
of all ranks together gives the price of a byte at which the memory is just used, and an upper bound of the gain. What
the rows of a dim-group take at that price becomes its slots, in which its rows are then chosen exactly (``assign``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexd.core.arrays import Float64Array
from flexd.core.placement import RankLayout
from flexd.planner.solver.assign import wanted_at

_BISECTIONS = 48


@dataclass(frozen=True)
class CopyMemory:
    """Memory of each rank for copies.

    Attributes:
        copy_bytes: of one copy of a row of each dim-group.
    """

    memory_bytes: int
    copy_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Demand:
    """Rows of one dim-group that may gain by copies.

    Attributes:
        node, device: float64[n] gains; -inf where the tier is not allowed.
        copy_bytes: of one copy.
        room: slots that each rank has for them.
    """

    node: Float64Array
    device: Float64Array
    copy_bytes: int
    room: int

    def at(self, price: float, layout: RankLayout) -> tuple[float, float]:
        """Return (sum of the gains less the price of the bytes, slots of a rank in the mean) at a price of a byte."""
        nodes, world = layout.nodes - 1.0, layout.world_size - 1.0
        gain, used = wanted_at(self.node, self.device, nodes, world, price * self.copy_bytes)
        return gain, min(used / layout.world_size, float(self.room))


@dataclass(frozen=True)
class Division:
    """The memory divided between dim-groups.

    Attributes:
        slots: of a rank, by dim-group; together they fit into the memory.
        price: exposed seconds that one more byte on a rank saves per step; 0 if there is enough memory.
        bound: the most that any copies within the memory gain; None: what is found for each dim-group holds.
    """

    slots: tuple[int, ...]
    price: float
    bound: float | None


def divide(demands: Sequence[Demand], layout: RankLayout, memory_bytes: int) -> Division:
    """Divide the bytes of a rank between dim-groups, so that a byte saves the same time in each of them."""
    rooms = [min(each.room, max(memory_bytes, 0) // each.copy_bytes) for each in demands]
    sizes = np.array([each.copy_bytes for each in demands], dtype=np.float64)
    if float(sizes @ np.array(rooms, np.float64)) <= memory_bytes:
        return Division(tuple(rooms), 0.0, None)

    def used_at(price: float) -> tuple[float, Float64Array]:
        found = [each.at(price, layout) for each in demands]
        gain = sum(gained for gained, _ in found) + price * layout.world_size * memory_bytes
        return gain, np.minimum([slots for _, slots in found], rooms)

    price, (bound, used) = 0.0, used_at(0.0)
    more = used
    if float(used @ sizes) > memory_bytes:
        low, high = 0.0, max(_highest_price(each, layout) for each in demands)
        for _ in range(_BISECTIONS):
            price = (low + high) / 2
            most, wanted = used_at(price)
            bound = min(bound, most)
            if float(wanted @ sizes) > memory_bytes:
                low, more = price, wanted
            else:
                high, used = price, wanted
        price, (_, used) = high, used_at(high)
    slots = np.floor(used)
    # What is left goes to the rows that a slightly lower price would add, and to ranks with more than the mean.
    for wanted in (np.ceil(more), np.ceil(2 * more + 1)):
        for number in np.argsort(-(wanted - slots) * sizes, kind="stable"):
            left = (memory_bytes - float(slots @ sizes)) // sizes[number]
            slots[number] += max(0.0, min(left, wanted[number] - slots[number], rooms[number] - slots[number]))
    return Division(tuple(int(each) for each in slots), price, bound)


def _highest_price(demand: Demand, layout: RankLayout) -> float:
    """Return a price of a byte at which no row of the dim-group has a copy."""
    node, device = demand.node.max(initial=0.0), demand.device.max(initial=0.0)
    of_node = node / (layout.nodes - 1) if layout.nodes > 1 else 0.0
    of_device = device / (layout.world_size - 1) if layout.world_size > 1 else 0.0
    return float(max(of_node, of_device, 0.0)) / demand.copy_bytes
