"""FlexShard's rule for tiers: two cuts in the order of access probability, within a cap on memory.

"FlexShard: Flexible Sharding for Industry-Scale Sequence Recommendation Models" (arXiv 2301.02959) chooses per row, by
its access probability, between one copy, a copy in every node and a copy on every rank. Every look-up of a row that is
not on the rank travels, once for each access; touched copies are all-reduced. Replays and prices of this peer both
use the tiers that ``flexshard_tiers`` returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Placement
from flexd.planner.model.balance import rank_bytes, sums_by_home
from flexd.planner.model.cost import CostBreakdown, LoadSums, cost_of_ranks
from flexd.planner.model.prices import exposed_share, linear_exposure, prices, slower_link_only
from flexd.planner.model.row_bytes import Exchange, direct_byte_factors
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.model.workload import STATISTICS, make_loads
from flexd.sketch.profile import Profile
from flexd.topology.cluster import Cluster

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]


def flexshard_placement(
    profile: Profile,
    keyspace: KeySpace,
    layout: RankLayout,
    cluster: Cluster,
    replica_slots: Sequence[int],
    shape: TrainingShape | None = None,
) -> Placement:
    """The tiers of all listed rows within the memory of ``replica_slots`` of every rank, one number a dim-group.

    A cap on memory is in bytes: dim-groups share it. Gradients are pushed in every pass, as fused optimizers do.

    Raises:
        PlanError: the profile is empty or of other tables.
    """
    shape = replace(shape or TrainingShape(), merged_backward=False)
    loads = make_loads(profile, keyspace, layout, shape)
    cap = float(np.dot([load.row_bytes + load.state_bytes for load in loads], replica_slots))
    found = flexshard_tiers([LoadSums(load, layout) for load in loads], layout, cluster, cap)
    keys = np.concatenate([load.keys for load in loads])
    tiers = np.concatenate(found.listed)
    above = np.flatnonzero(tiers)
    return Placement.of(keys[above], tiers[above])


_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Of the memory for replicas that are tried: busiest ranks and latencies are no part of a row's saving."""
_EXACT_CUTS, _CUTS = 4096, 8192
"""Cuts are tried after each of the first rows, and after that at even distances on a logarithmic scale."""
_BISECTIONS = 80
_FIT_BISECTIONS = 6


@dataclass(frozen=True)
class FlexShardTiers:
    """Tiers of all rows.

    Attributes:
        listed: of each dim-group uint8[h], of its listed rows.
        bins: of each dim-group float64[tier, k], rows of its bins.
        replica_bytes: float64[world], rows and optimizer state of the replicas.
        cost: of a step.
    """

    listed: tuple[UInt8Array, ...]
    bins: tuple[Float64Array, ...]
    replica_bytes: Float64Array
    cost: CostBreakdown

    def rows(self, tier: Tier) -> float:
        """Return the number of rows of this tier."""
        return sum(float((mine == tier).sum()) for mine in self.listed) + sum(float(b[tier].sum()) for b in self.bins)


def flexshard_tiers(
    sums: Sequence[LoadSums], layout: RankLayout, cluster: Cluster, replica_bytes: float
) -> FlexShardTiers:
    """Return the tiers of the shortest step within ``replica_bytes`` of replicas on every rank, of all dim-groups.

    Cuts maximise the sum of the rows' savings at the prices of this cluster. Prices depend on the size of messages, so
    the cuts are chosen once at the prices of row-wise sharding, and again at those of the best step.
    """
    problem = _Problem(tuple(_Rows(group, layout) for group in sums), layout, cluster)
    nothing = [_Cuts(0.0, 0.0)] * len(sums)
    best = problem.tiers(nothing)
    tiers = tuple(tier for tier, has in ((Tier.NODE, layout.nodes > 1), (Tier.DEVICE, layout.local_ranks > 1)) if has)
    for _ in range(2):
        at = best.cost
        for allowed in _subsets(tiers):
            saved = problem.saved_seconds(at, allowed)
            for share in _SHARES:
                cuts = problem.fitted(problem.best_cuts(saved, share * replica_bytes), share * replica_bytes)
                found = problem.tiers(cuts)
                if found.cost.peak_exposed_seconds < best.cost.peak_exposed_seconds:
                    best = found
    return best


def _subsets(tiers: tuple[Tier, ...]) -> Iterator[tuple[Tier, ...]]:
    if tiers:
        yield tiers
    if len(tiers) > 1:
        yield from ((tier,) for tier in tiers)


@dataclass(frozen=True)
class _Cuts:
    """Of a dim-group's rows by falling accesses, the first ``device`` are on every rank, those up to ``end`` in every
    node."""

    device: float
    end: float


@dataclass(frozen=True)
class _Rows:
    """A dim-group's rows by falling accesses: listed rows one by one, and bins of rows of equal frequency."""

    sums: LoadSums
    layout: RankLayout

    @cached_property
    def order(self) -> Int64Array:
        """int64[h + k], listed rows and after them bins."""
        load = self.sums.load
        order: Int64Array = np.argsort(-np.concatenate([load.accesses, load.bin_accesses]), kind="stable")
        return order

    @cached_property
    def before(self) -> Float64Array:
        """float64[h + k + 1], rows before each in this order, and all of them."""
        load = self.sums.load
        number = np.concatenate([np.ones(len(load.keys)), load.bin_rows])[self.order]
        before: Float64Array = np.concatenate([[0.0], np.cumsum(number)])
        return before

    @cached_property
    def bin_places(self) -> Int64Array:
        """int64[k], place of each bin in this order."""
        bins = np.flatnonzero(self.order >= len(self.sums.load.keys))
        places: Int64Array = bins[np.argsort(self.order[bins])]
        return places

    @cached_property
    def sampled(self) -> Int64Array:
        """Places in the order at which the rows may be cut, the first one and the last one among them."""
        last = len(self.order)
        few = np.arange(min(last, _EXACT_CUTS) + 1)
        if last <= _EXACT_CUTS:
            return few
        more = np.geomspace(_EXACT_CUTS, last, _CUTS).astype(np.int64)
        places: Int64Array = np.unique(np.concatenate([few, more, np.arange(len(self.sums.load.keys), last + 1)]))
        return places

    @property
    def stored_bytes(self) -> int:
        return self.sums.load.row_bytes + self.sums.load.state_bytes

    @property
    def copy_bytes(self) -> Float64Array:
        """float64[tier], bytes of a row's replicas on the mean rank."""
        layout = self.layout
        return self.stored_bytes * np.array([0.0, layout.nodes - 1.0, layout.world_size - 1.0]) / layout.world_size

    def tiers(self, cuts: _Cuts) -> tuple[UInt8Array, Float64Array]:
        """(uint8[h] tiers of the listed rows, float64[tier, k] rows of the bins)."""
        rows = len(self.sums.load.keys)
        device, end = np.searchsorted(self.before[:-1] + 0.5, [cuts.device, cuts.end], side="right")
        listed = np.zeros(len(self.order), np.uint8)
        listed[self.order[device:end]] = Tier.NODE
        listed[self.order[:device]] = Tier.DEVICE
        first, last = self.before[self.bin_places], self.before[self.bin_places + 1]
        above = [np.clip(cut, first, last) - first for cut in (cuts.device, cuts.end)]
        return listed[:rows], np.array([last - first - above[1], above[1] - above[0], above[0]])

    def replica_bytes(self, listed: UInt8Array, bins: Float64Array) -> Float64Array:
        """float64[world]; rows of bins are spread evenly."""
        used = self.layout.replica_slots_used(self.sums.load.keys, listed).astype(np.float64)
        return used * self.stored_bytes + float(self.copy_bytes @ bins.sum(axis=1))


@dataclass(frozen=True)
class _Problem:
    rows: tuple[_Rows, ...]
    layout: RankLayout
    cluster: Cluster

    def tiers(self, cuts: Sequence[_Cuts]) -> FlexShardTiers:
        """Return the tiers of these cuts, with their cost."""
        chosen = [rows.tiers(cut) for rows, cut in zip(self.rows, cuts, strict=True)]
        memory = np.zeros(self.layout.world_size)
        by_home, ranks = [], []
        for rows, (listed, bins) in zip(self.rows, chosen, strict=True):
            memory += rows.replica_bytes(listed, bins)
            even = bins @ rows.sums.load.bin_statistics(self.layout).T
            home = rows.sums.home_rank
            by_home.append(sums_by_home(rows.sums.listed, listed, home, even, self.layout, range(STATISTICS)))
            factors = direct_byte_factors(self.layout, rows.sums.load.wire_bytes, dedup=False)
            ranks.append(rank_bytes(by_home[-1], factors, self.layout, Exchange.DIRECT))
        total = ranks[0]
        for part in ranks[1:]:
            total = total + part
        by_tier = np.sum([home.sum(axis=2) for home in by_home], axis=0)
        cost = cost_of_ranks(total, [rows.sums for rows in self.rows], self.cluster, Exchange.DIRECT, by_tier)
        return FlexShardTiers(tuple(c[0] for c in chosen), tuple(c[1] for c in chosen), memory, cost)

    def saved_seconds(self, at: CostBreakdown, allowed: tuple[Tier, ...]) -> list[Float64Array]:
        """Of each dim-group float64[tier, places]: seconds that the rows before each place save against one copy, at
        the prices of this step; -inf for a tier that is not allowed."""
        each = prices(at.bytes, self.cluster, self.rows[0].sums.load.micro_batches, Exchange.DIRECT)
        # One all-to-all uses both links at the same time: of HOME rows only the slower link counts.
        counts = np.where(at.bytes * each > 0, slower_link_only(at.bytes * each) > 0, 1.0)
        share = exposed_share(linear_exposure(self.cluster, at.phase_seconds.sum(axis=1)))
        price = each * counts * share[None, :, None]
        result = []
        for rows in self.rows:
            load = rows.sums.load
            factors = direct_byte_factors(self.layout, load.wire_bytes, dedup=False)
            of_tier = np.einsum("tpls,tpl->ts", factors, price)
            of_bins = load.bin_statistics(self.layout) * load.bin_rows
            seconds = np.concatenate([of_tier @ rows.sums.listed, of_tier @ of_bins], axis=1)[:, rows.order]
            saved = np.zeros((len(Tier), len(rows.sampled)))
            for tier in (Tier.NODE, Tier.DEVICE):
                gained = np.concatenate([[0.0], np.cumsum(seconds[Tier.HOME] - seconds[tier])])
                saved[tier] = gained[rows.sampled] if tier in allowed else -np.inf
                saved[tier, 0] = 0.0
            result.append(saved)
        return result

    def best_cuts(self, saved: Sequence[Float64Array], replica_bytes: float) -> list[_Cuts]:
        """Return the cuts that save most in these bytes of the mean rank: those of one price of a byte."""
        free = self._cuts_at(saved, 0.0)
        if self._mean_bytes(free) <= replica_bytes:
            return free
        low, high = 0.0, 1e-18
        while self._mean_bytes(self._cuts_at(saved, high)) > replica_bytes:
            low, high = high, high * 16
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            over = self._mean_bytes(self._cuts_at(saved, middle)) > replica_bytes
            low, high = (middle, high) if over else (low, middle)
        less, more = self._cuts_at(saved, high), self._cuts_at(saved, low)
        within, above = self._mean_bytes(less), self._mean_bytes(more)
        part = (replica_bytes - within) / max(above - within, 1e-300)
        return [
            _Cuts(a.device + part * (b.device - a.device), a.end + part * (b.end - a.end))
            for a, b in zip(less, more, strict=True)
        ]

    def _cuts_at(self, saved: Sequence[Float64Array], byte_price: float) -> list[_Cuts]:
        cuts = []
        for rows, mine in zip(self.rows, saved, strict=True):
            number = rows.before[rows.sampled]
            node, device = (mine[tier] - byte_price * rows.copy_bytes[tier] * number for tier in (1, 2))
            if np.isneginf(node[-1]):
                best = int(device.argmax())
                cuts.append(_Cuts(float(number[best]), float(number[best])))
                continue
            more = device - node
            first, end = int(more.argmax()), int(node.argmax())
            if first > end:  # no NODE rows between: all that have copies are DEVICE rows
                ahead = node[: first + 1].argmax()
                pairs = [(int(device.argmax()),) * 2, (int(more[: ahead + 1].argmax()), int(ahead))]
                pairs.append((int(more[: end + 1].argmax()), end))
                first, end = max(pairs, key=lambda pair: float(more[pair[0]] + node[pair[1]]))
            cuts.append(_Cuts(float(number[first]), float(number[end])))
        return cuts

    def _mean_bytes(self, cuts: Sequence[_Cuts]) -> float:
        total = 0.0
        for rows, cut in zip(self.rows, cuts, strict=True):
            size = rows.copy_bytes
            total += float(size[Tier.DEVICE] * cut.device + size[Tier.NODE] * (cut.end - cut.device))
        return total

    def fitted(self, cuts: Sequence[_Cuts], replica_bytes: float) -> list[_Cuts]:
        """Return as much of these cuts as every rank has room for: homes are spread evenly, but not exactly so.

        The coldest rows lose their copies first.
        """

        def scaled(part: float) -> list[_Cuts]:
            return [_Cuts(min(cut.device, part * cut.end), part * cut.end) for cut in cuts]

        def most_bytes(part: float) -> float:
            memory = np.zeros(self.layout.world_size)
            for rows, cut in zip(self.rows, scaled(part), strict=True):
                memory += rows.replica_bytes(*rows.tiers(cut))
            return float(memory.max())

        limit = replica_bytes * (1 + 1e-12)
        if (most := most_bytes(1.0)) <= limit:
            return list(cuts)
        step = most / max(replica_bytes, 1e-300) - 1
        low, high = max(1.0 - step, 0.0), 1.0
        while low > 0 and most_bytes(low) > limit:
            step *= 2
            low, high = max(1.0 - step, 0.0), low
        for _ in range(_FIT_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if most_bytes(middle) <= limit else (low, middle)
        return scaled(low)
