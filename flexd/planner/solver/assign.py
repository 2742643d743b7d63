"""Tiers for the rows of one dim-group within every rank's slots, once each row's gain at each tier is known.

The Lagrangian relaxation of the slots gives the price of a slot, and an upper bound of the gain. Rows far from every
threshold are where they belong at any good price; what a price cannot do is to pack the last slots of ranks whose
limits differ (a multi-dimensional knapsack). So all rows but the *core*, about which prices leave doubt, keep their
tiers, and the core is chosen anew in the slots that this leaves by a mixed integer program (HiGHS through scipy). With
all rows in the core the choice is optimal, the bound tight. Quotas say how many more rows fit into the slots of their
ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flexd.core.arrays import BoolArray, Float64Array, Int64Array, UInt8Array
from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace
from flexd.core.placement import RankLayout, Tier
from flexd.core.sharding_types import ROW_WISE

FREE = 255
"""Marks a row that is not pinned: the optimiser chooses its tier."""


@dataclass(frozen=True)
class RowPin:
    """Rows of one table that keep one tier.

    Attributes:
        rows: int64[n] row ids; None: the whole table.
    """

    table: str
    tier: Tier
    rows: Int64Array | None = None


@dataclass(frozen=True)
class PlanLimits:
    """Limits that the user sets.

    Attributes:
        pins: rows whose tier is fixed, whether it pays or not. A later pin of the same row counts.
        exclude_tables: tables that stay at HOME; a pin above HOME of such a table is an error.
    """

    pins: tuple[RowPin, ...] = ()
    exclude_tables: frozenset[str] = frozenset()

    def check(self, keyspace: KeySpace) -> None:
        """Raise PlanError that names the fault: an unknown table, or a row outside."""
        named = {*self.exclude_tables, *(pin.table for pin in self.pins)}
        unknown = sorted(named - set(keyspace.index))
        if unknown:
            raise PlanError(f"tables that do not exist: {', '.join(unknown)}", remedy="name tables of the job")
        for pin in self.pins:
            if pin.table in self.exclude_tables and pin.tier != Tier.HOME:
                raise PlanError(
                    f"table {pin.table!r} is excluded and pinned to {pin.tier.name}", remedy="give one of the two"
                )
            if keyspace.tables[keyspace.index[pin.table]].sharding != ROW_WISE and pin.tier != Tier.HOME:
                raise PlanError(
                    f"table {pin.table!r} is not {ROW_WISE} and is pinned to {pin.tier.name}",
                    remedy=f"plans copy rows of {ROW_WISE} tables alone",
                )
            rows = keyspace.tables[keyspace.index[pin.table]].rows
            if pin.rows is not None and len(pin.rows) and not 0 <= int(pin.rows.min()) <= int(pin.rows.max()) < rows:
                raise PlanError(
                    f"a pinned row of table {pin.table!r} is outside it", remedy=f"rows are 0 to {rows - 1}"
                )

    def replicated_keys(self, keyspace: KeySpace) -> Int64Array:
        """Return int64[n] keys pinned above HOME, which the loads must list."""
        keys = [
            keyspace.keys(
                keyspace.index[pin.table],
                np.arange(keyspace.tables[keyspace.index[pin.table]].rows) if pin.rows is None else pin.rows,
            )
            for pin in self.pins
            if pin.tier != Tier.HOME
        ]
        return np.unique(np.concatenate([np.empty(0, np.int64), *keys]))

    def fixed_tiers(self, keys: Int64Array, keyspace: KeySpace) -> UInt8Array:
        """Return uint8[n]: the tier that pins and excluded tables give each of the ascending keys, else FREE."""
        # Copies of rows that are not spread over all ranks have other costs than are priced here.
        stay = self.exclude_tables | {table.name for table in keyspace.tables if table.sharding != ROW_WISE}
        fixed = np.full(len(keys), FREE, np.uint8)
        for pin in (*(RowPin(name, Tier.HOME) for name in sorted(stay)), *self.pins):
            fixed[_of_rows(keys, keyspace, keyspace.index[pin.table], pin.rows)] = pin.tier
        return fixed


def _of_rows(keys: Int64Array, keyspace: KeySpace, table: int, rows: Int64Array | None) -> Int64Array:
    """int64: positions in the ascending ``keys`` of these rows (None: all) of the table."""
    first = int(keyspace.first_key[table])
    start, end = np.searchsorted(keys, [first, first + keyspace.tables[table].rows])
    of_table = np.arange(start, end)
    return of_table if rows is None else of_table[np.isin(keys[start:end], keyspace.keys(table, rows))]


@dataclass(frozen=True)
class GroupLimits:
    """Limits of one dim-group.

    Attributes:
        slots: int64[world], replica slots of each rank.
        fixed: uint8[h], tier of each listed row that is pinned, else FREE.
    """

    slots: Int64Array
    fixed: UInt8Array

    def fits(self, keys: Int64Array, tiers: UInt8Array, layout: RankLayout) -> bool:
        """Return whether these tiers keep to slots and pins."""
        within = bool((layout.replica_slots_used(keys, tiers) <= self.slots).all())
        return within and not bool(((self.fixed != FREE) & (tiers != self.fixed)).any())


def slots_used(keys: Int64Array, tiers: UInt8Array, keyspace: KeySpace, layout: RankLayout) -> Int64Array:
    """Return int64[groups, world]: replica slots that rows at these tiers use."""
    group = keyspace.group_of(keys)
    return np.stack(
        [layout.replica_slots_used(keys[group == g], tiers[group == g]) for g in range(len(keyspace.groups))]
    )


def best_within_slots(gains: Float64Array, homes: Int64Array, slots: Int64Array) -> BoolArray:
    """Choose the rows of the largest summed gain.

    Args:
        gains: float64[n], above 0. Equal gains are taken in the order given.
        homes: int64[n], home of each row as an index into ``slots``.
        slots: int64[r], r >= 2, at least 0: free slots of each rank of the set.

    Returns:
        bool[n].
    """
    rows = len(gains)
    sizes = np.bincount(homes, minlength=len(slots))
    if bool((rows - sizes <= slots).all()):
        return np.ones(rows, np.bool_)
    order = np.argsort(-gains, kind="stable")
    place = np.empty(rows, np.int64)
    place[order] = np.arange(rows)
    # Rows by home, best first; (home, place) as one number makes counts of all homes one binary search.
    # (16 bit integers are sorted by radix.)
    small = homes.astype(np.uint16) if len(slots) <= 2**16 else homes
    by_home = order[np.argsort(small[order], kind="stable")]
    code = homes[by_home] * rows + place[by_home]
    starts = np.cumsum(sizes) - sizes
    prefix = np.concatenate([[0.0], np.cumsum(gains[by_home])])
    ranks = np.arange(len(slots), dtype=np.int64)

    def among_best(count: int) -> Int64Array:
        """int64[r]: how many of the ``count`` best rows each home has."""
        return np.searchsorted(code, ranks * rows + count) - starts

    def choose(total: int) -> Int64Array:
        """int64[r]: rows of each home in the best choice of ``total`` rows."""
        quota = np.maximum(total - slots, 0)
        low, high = 0, total
        while low < high:
            middle = (low + high) // 2
            enough = int(np.maximum(among_best(middle), quota).sum()) >= total
            low, high = (low, middle) if enough else (middle + 1, high)
        return np.maximum(among_best(low), quota)

    def value(total: int) -> float:
        return float((prefix[starts + choose(total)] - prefix[starts]).sum())

    def fits(total: int) -> bool:
        quota = np.maximum(total - slots, 0)
        return bool((quota <= sizes).all()) and int(quota.sum()) <= total

    # What fits is an interval from 0: a quota grows with T at least as fast as T itself.
    low, high = min(int(slots.min(initial=0)), rows), rows
    most = low
    while most < high:
        middle = (most + high + 1) // 2
        most, high = (middle, high) if fits(middle) else (most, middle - 1)
    while low < most:
        middle = (low + most) // 2
        low, most = (middle + 1, most) if value(middle + 1) > value(middle) else (low, middle)
    count = choose(low)
    result = np.zeros(rows, np.bool_)
    result[by_home] = np.arange(rows) - np.repeat(starts, sizes) < np.repeat(count, sizes)
    return result


_MAX_CORE_ROWS = 192
# Core rows x limits: with many ranks fewer rows are chosen anew, so that it stays a matter of milliseconds.
_MAX_CORE_ENTRIES = 3_072
_MIN_CORE_ROWS = 24
# Of the search tree: a limit of time would make plans depend on the machine.
_MAX_NODES = 16
# Of the largest gain: HiGHS stops within 1e-6 of the optimum.
_SCALE = 1e5
# By which a bound of HiGHS may be too tight, as a share of the gain.
_SLACK = 1e-9


def best_core(
    layout: RankLayout, keys: Int64Array, decision: Float64Array, slots: Int64Array
) -> tuple[UInt8Array, float] | None:
    """(uint8[n] tiers within all limits, the most that any such tiers gain).

    The tiers are the best there are unless the search was cut off. None: it was, before it found any.

    Args:
        keys: int64[n], rows to choose tiers for.
        decision: float64[tier, n] gains; -inf where a tier is not allowed, HOME is 0.
        slots: int64[world], at least 0, that are free for them.
    """
    tier, row = np.nonzero(decision > 0)
    if not len(row):
        return np.zeros(len(keys), np.uint8), 0.0
    # Imported with the first plan: it would take an eighth of the daemon's start.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_matrix

    gain = decision[tier, row]
    scale = _SCALE / float(gain.max())
    held = [layout.holds_replica(rank, keys[row], tier.astype(np.uint8)) for rank in range(layout.world_size)]
    limits = coo_matrix(np.stack(held).astype(np.float64))
    once = coo_matrix((np.ones(len(row)), (row, np.arange(len(row)))), shape=(len(keys), len(row)))
    result = milp(
        -gain * scale,
        constraints=[LinearConstraint(limits.tocsr(), ub=slots), LinearConstraint(once.tocsr(), ub=1.0)],
        integrality=np.ones(len(row)),
        bounds=Bounds(0.0, 1.0),
        options={"mip_rel_gap": 0.0, "node_limit": _MAX_NODES},
    )
    if result.x is None:
        return None
    chosen = np.round(result.x) > 0
    if bool((limits @ chosen > slots).any()) or bool((once @ chosen > 1).any()):
        return None
    tiers = np.zeros(len(keys), np.uint8)
    tiers[row[chosen]] = tier[chosen]
    total = float(gain[chosen].sum())
    bound = float("nan") if result.mip_dual_bound is None else -float(result.mip_dual_bound) / scale
    return tiers, max(bound, total) + _SLACK * total if np.isfinite(bound) else np.inf


# Up to so many rows more prices are tried, and the last slots are packed exactly; beyond, one row hardly counts.
_SMALL_PROBLEM_ROWS = 20_000
_PRICE_FACTORS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
_BISECTIONS = 48


@dataclass(frozen=True)
class Assignment:
    """Choose tiers for the rows that can gain; the others stay where their pin or HOME has them.

    Attributes:
        keys: int64[h], all listed rows.
        decision: float64[tier, h] gains; HOME is 0.
        allowed: tiers above HOME that rows may take at all.

    Raises (``base``):
        PlanError: the pinned rows alone take more slots than there are.
    """

    layout: RankLayout
    keys: Int64Array
    decision: Float64Array
    limits: GroupLimits
    allowed: tuple[Tier, ...]

    @cached_property
    def base(self) -> UInt8Array:
        """uint8[h]: pinned rows at their tiers, all others at HOME."""
        fixed = self.limits.fixed
        tiers = np.where(fixed == FREE, 0, fixed).astype(np.uint8)
        if not self.limits.fits(self.keys, tiers, self.layout):
            raise PlanError(
                "the pinned rows take more replica slots than there are",
                remedy="pin fewer rows, or raise the replica slots of the ranks",
            )
        return tiers

    def best(self, decision_of: Float64Array) -> tuple[UInt8Array, float]:
        """(uint8[h] tiers within all limits, the most that any such tiers gain).

        Args:
            decision_of: float64[tier, h] like ``decision``, with -inf where a tier is not allowed this time.
        """
        gains = np.maximum(decision_of[Tier.NODE], decision_of[Tier.DEVICE]) > 0
        rows = np.flatnonzero(gains & (self.limits.fixed == FREE))
        tiers = self.base.copy()
        if not len(rows) or not self.allowed:
            return tiers, 0.0
        slots = self.limits.slots - self.layout.replica_slots_used(self.keys, self.base)
        part = _GainingRows(self.layout, self.keys[rows], np.ascontiguousarray(decision_of[:, rows]), slots)
        chosen, bound = part.best()
        tiers[rows] = chosen
        return tiers, bound


@dataclass(frozen=True)
class _GainingRows:
    """Rows that gain at some tier, and the slots that are free for them."""

    layout: RankLayout
    keys: Int64Array
    decision: Float64Array
    slots: Int64Array

    def gain(self, tiers: UInt8Array) -> float:
        return float(np.take_along_axis(self.decision, tiers[None, :].astype(np.int64), axis=0).sum())

    def best(self) -> tuple[UInt8Array, float]:
        """(uint8[n] tiers within all limits, the most that any such tiers gain)."""
        node, device = self.decision[Tier.NODE], self.decision[Tier.DEVICE]
        price, bound = best_price(
            node, device, self.layout.nodes - 1.0, self.layout.world_size - 1.0, float(self.slots.sum())
        )
        best = max(self.candidates(price), key=self.gain)
        both = bool((node > 0).any() and (device > 0).any())
        if both and len(self.keys) <= _SMALL_PROBLEM_ROWS and bound > self.gain(best):
            best, bound = self.refine(best, bound, price)
        return best, max(bound, self.gain(best))

    def refine(self, tiers: UInt8Array, bound: float, price: float) -> tuple[UInt8Array, float]:
        """(uint8[n] tiers no worse than these, bound no looser): the rows nearest to a threshold are chosen exactly."""
        rows = min(_MAX_CORE_ROWS, _MAX_CORE_ENTRIES // self.layout.world_size, len(self.keys))
        if rows < min(_MIN_CORE_ROWS, len(self.keys)):
            return tiers, bound
        # By the lead of a row's best tier over its second best at this price of a slot.
        counts = np.array([0.0, self.layout.nodes - 1.0, self.layout.world_size - 1.0])[:, None]
        net = np.sort(self.decision - price * counts, axis=0)
        core = np.sort(np.argsort(net[-1] - net[-2], kind="stable")[:rows])
        rest = tiers.copy()
        rest[core] = Tier.HOME
        slots = self.slots - self.layout.replica_slots_used(self.keys, rest)
        found = best_core(self.layout, self.keys[core], self.decision[:, core], slots)
        if found is None:
            return tiers, bound
        rest[core], most = found
        better = rest if self.gain(rest) > self.gain(tiers) else tiers
        return better, min(bound, most) if rows == len(self.keys) else bound

    def candidates(self, price: float) -> Iterator[UInt8Array]:
        """Yield tiers with rows at DEVICE as upgrades alone, and with those that are best there at prices of a slot."""
        yield self.fit_slots(np.empty(0, np.int64))
        node, device = self.decision[Tier.NODE], self.decision[Tier.DEVICE]
        factors = _PRICE_FACTORS if len(self.keys) <= _SMALL_PROBLEM_ROWS else (1.0,)
        for of_slot in sorted({0.0, *(factor * price for factor in factors)}):
            least = np.maximum(node - of_slot * (self.layout.nodes - 1.0), 0.0)
            best = np.flatnonzero(device - of_slot * (self.layout.world_size - 1.0) > least)
            if len(best):
                yield self.fit_slots(best)

    def fit_slots(self, device: Int64Array) -> UInt8Array:
        """Return uint8[n] tiers that fit every rank: the rows ``device`` at DEVICE, NODE into what is left."""
        layout, decision = self.layout, self.decision
        tiers = np.zeros(len(self.keys), np.uint8)
        if len(device) and layout.local_ranks > 1:
            fits = best_within_slots(decision[Tier.DEVICE, device], layout.home_rank(self.keys[device]), self.slots)
            tiers[device[fits]] = Tier.DEVICE
        if layout.nodes == 1:
            return tiers
        free = self.slots - layout.replica_slots_used(self.keys, tiers)
        rest = np.flatnonzero((tiers == Tier.HOME) & (decision[Tier.NODE] > 0))
        rail = self.keys[rest] % layout.local_ranks
        for local in range(layout.local_ranks):
            rows = rest[rail == local]
            if len(rows):
                fits = best_within_slots(
                    decision[Tier.NODE, rows], layout.home_node(self.keys[rows]), free[layout.rail_ranks(local)]
                )
                tiers[rows[fits]] = Tier.NODE
        self.upgrade(tiers)
        return tiers

    def upgrade(self, tiers: UInt8Array) -> None:
        """Raise NODE rows to DEVICE, in place, in the slots that are left: exact, given the rows at NODE.

        Their own rail holds these rows already, so an upgrade takes a slot on every rank of the other rails.
        """
        layout, rows = self.layout, np.flatnonzero(tiers == Tier.NODE)
        more = self.decision[Tier.DEVICE, rows] - self.decision[Tier.NODE, rows]
        rows, more = rows[more > 0], more[more > 0]
        if len(rows) and layout.local_ranks > 1:
            free = self.slots - layout.replica_slots_used(self.keys, tiers)
            least = free.reshape(layout.nodes, layout.local_ranks).min(axis=0)
            fits = best_within_slots(more, self.keys[rows] % layout.local_ranks, least)
            tiers[rows[fits]] = Tier.DEVICE


def wanted_at(
    node: Float64Array, device: Float64Array, node_slots: float, device_slots: float, price: float
) -> tuple[float, float]:
    """(sum of gain - price x slots, slots on all ranks together) of the rows if each takes its best tier at a price of
    a slot. Arguments as of ``best_price``."""
    at_node, at_device = node - price * node_slots, device - price * device_slots
    best = np.maximum(at_node, at_device)
    replicated = best > 0
    devices = np.count_nonzero(replicated & (at_device > at_node))
    nodes = np.count_nonzero(replicated) - devices
    return float(best.sum(where=replicated)), node_slots * nodes + device_slots * devices


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
        gain, used = wanted_at(node, device, node_slots, device_slots, price)
        return gain + price * slots, used

    dual, used = relaxed(0.0)
    if used <= slots:
        return 0.0, dual
    # The highest possible price of a slot.
    low, high = 0.0, max(float(node.max()) / node_slots if node_slots > 0 else 0.0, float(device.max()) / device_slots)
    high = max(high, 0.0)
    middle = high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        value, used = relaxed(middle)
        dual = min(dual, value)
        low, high = (middle, high) if used > slots else (low, middle)
        if high - low <= 1e-9 * high or used == slots:
            break
    return (middle if used == slots else high), dual
