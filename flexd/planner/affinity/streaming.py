"""Homes and dealing kept up with the stream: learnt from the co-access sample, again and again, from where they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout
from flexd.core.node_map import NodeMap
from flexd.planner.affinity.partition import FROM_HOMES, AffinityLimits, NodeHomes, learn_homes
from flexd.planner.affinity.sampled_window import SampledWindow
from flexd.planner.affinity.traffic import MIN_SAVING, AffinityTraffic, rule_nodes, traffic
from flexd.planner.affinity.user_nodes import crossing_by_user, users_of_window

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

PROBABILITIES = (None, 0.5, FROM_HOMES)
"""Of a use to count in the bisection; the newest batches decide (``AffinityLimits.probability``)."""
MIN_BATCHES = 4
JUDGED_SHARE, MAX_JUDGED = 0.25, 8
"""Newest batches that judge what was learnt from those before them."""
CONTINUE_WITHIN = 0.01
"""Homes are learnt on from those before unless a new division saves this share more, its moves counted."""
_DIVIDED_ENTRIES = 2_000_000
"""Rows of samples up to which the whole window is divided anew. A larger one is divided by its newest batches of about
as many; the others are dealt by what those say, which takes two passes over them."""
_PERCENTILES = (5.0, 95.0)
FORGOTTEN_AFTER = 8
"""Plans after which a moved row that the window does not hold any more goes back to where its rule puts it."""


@dataclass(frozen=True)
class ShareRange:
    """A predicted share of the chain's bytes between nodes, and the 5th to the 95th percentile over batches."""

    expected: float
    low: float
    high: float


@dataclass(frozen=True)
class AffinityPlan:
    """Homes by node, and what they are expected to send.

    Attributes:
        homes: of the sampled rows, and of rows moved before that stay; all others are where their rule puts them.
        unseen: int64 [rows of ``homes``], plans since the window held the row.
        moves: int64 [rows], keys of the rows that move now, ascending.
        moved_rows: rows that are not where their rule puts them.
        move_bytes: that the moves send once, values and optimizer state.
        loader: bytes between nodes over the chain's, with a loader that sends each sample to its node; None if there
            are too few batches to tell.
        dealing_loader: the same with every row where its rule puts it: dealing alone.
        placed: the same with every row where it is now; as ``dealing_loader`` if none has moved.
        traffic: behind ``loader``, of the newest batches together.
        users: the node of each user, by where rows are to live: ``homes`` if they are in place, else where their rule
            puts them. None without ids of users.
        by_user: bytes with each user's samples in her node, judged as ``loader``.
        batches, batch_samples: of the window.
        continued: whether it went on from the homes before.
        probability: of the bisection that was best; the next call may start with it.
    """

    homes: NodeHomes
    unseen: Int64Array
    moves: Int64Array
    moved_rows: int
    move_bytes: float
    loader: ShareRange | None
    dealing_loader: ShareRange | None
    placed: ShareRange | None
    traffic: AffinityTraffic | None
    users: NodeMap | None
    by_user: ShareRange | None
    batches: int
    batch_samples: int
    continued: bool
    probability: float | None

    def pays(self, min_saving: float = MIN_SAVING) -> bool:
        """Return whether even the high end of the range saves a share of the chain's bytes; False means "no gain
        expected"."""
        found = self.loader
        return found is not None and found.expected <= 1 - min_saving and found.high < 1

    def moves_pay(self, min_saving: float = MIN_SAVING) -> bool:
        """Return whether moved rows save a share of the chain's bytes beside dealing alone."""
        alone, both = self.dealing_loader, self.loader
        return alone is not None and both is not None and alone.expected - both.expected >= min_saving

    def bytes_per_step(self) -> tuple[float, float]:
        """Return (the chain's bytes between nodes in a step of the whole job, those with affinity); NaN if unknown."""
        if self.traffic is None or not self.traffic.batches:
            return float("nan"), float("nan")
        sent = self.traffic
        chain = sent.chain_rows * sent.row_bytes / sent.batches
        return chain, chain * sent.loader_ratio


def plan_affinity(
    window: SampledWindow,
    layout: RankLayout,
    before: AffinityPlan | None = None,
    limits: AffinityLimits | None = None,
    *,
    in_place: bool = False,
    fit: Callable[[NodeHomes], NodeHomes] = lambda homes: homes,
) -> AffinityPlan:
    """Return homes for the batches to come, with what the newest batches say of them. Equal inputs give equal plans.

    The newest quarter of the batches judges what is learnt from the others: three divisions made anew and, if there is
    a plan from before, that one learnt on. Then the homes are learnt from all batches in the way that was best.

    Args:
        before: the previous plan, whose homes are learnt on from if that is as good.
        in_place: whether its homes are in place. Then a row moves only if that pays against where it is; otherwise all
            rows are where their rule puts them.
        limits: ``min_gain`` is not used: what a move must win follows from ``window.costs``.
        fit: returns homes with the moves that there is room for.
    """
    limits = limits or AffinityLimits()
    rows = window.rows
    placed = before.homes if in_place and before is not None else None
    current = _current(rows.keys, layout, placed)
    judged, continued, probability, divided = _judge(window, layout, before, placed, limits, fit)
    start, how = None, replace(limits, probability=probability)
    if len(rows.rows) > _DIVIDED_ENTRIES and divided is not None:
        start, how = divided, replace(how, rounds=min(1, how.rounds), sweeps=1)
    elif continued and before is not None:
        start = before.homes
    homes = fit(learn_homes(rows, window.batch, current, layout.nodes, how, start, window.costs))
    at = np.flatnonzero(homes.home != current)
    moves, move_bytes = homes.keys[at], float(window.costs.stored_bytes[at].sum(dtype=np.float64))
    users = users_of_window(window, homes if in_place else replace(homes, home=current), layout)
    by_user = None if divided is None else _by_user(window, divided, layout, in_place=in_place)
    loader = dealing_loader = as_placed = sent = None
    if judged is not None:
        loader, sent = judged
        count = min(window.batches, sent.batches)
        alone = _by_rule(layout)
        newest = window.of_batches(window.batches - count, window.batches)
        dealing_loader, _ = _range_of(newest, alone, layout)
        as_placed = dealing_loader if placed is None else _range_of(newest, placed, layout)[0]
    unseen = np.zeros(len(homes.keys), dtype=np.int64)
    if placed is not None and before is not None:
        homes, unseen = _with_unseen(homes, before, layout)
    moved_rows = int(np.count_nonzero(homes.home != rule_nodes(homes.keys, layout)))
    return AffinityPlan(
        homes, unseen, moves, moved_rows, move_bytes, loader, dealing_loader, as_placed, sent, users,
        by_user, window.batches, window.batch_samples, continued, probability,
    )  # fmt: skip


def _by_rule(layout: RankLayout) -> NodeHomes:
    """Return homes that know no row: all are where their rule puts them."""
    none = np.empty(0, dtype=np.int64)
    return NodeHomes(none, none, np.empty((0, layout.nodes), dtype=np.float32), 0.0, 0)


def _current(keys: Int64Array, layout: RankLayout, placed: NodeHomes | None) -> Int64Array:
    rule = rule_nodes(keys, layout)
    return rule if placed is None else placed.home_of(keys, rule)


def _with_unseen(homes: NodeHomes, before: AffinityPlan, layout: RankLayout) -> tuple[NodeHomes, Int64Array]:
    """Add the moved rows of the plan before that the window does not hold: they stay, for a while, where they are."""
    old = before.homes
    elsewhere = old.home != rule_nodes(old.keys, layout)
    stays = elsewhere & (before.unseen + 1 < FORGOTTEN_AFTER) & ~np.isin(old.keys, homes.keys, assume_unique=True)
    keys = np.concatenate([homes.keys, old.keys[stays]])
    order = np.argsort(keys, kind="stable")
    unknown = np.ones((int(stays.sum()), homes.nodes), dtype=np.float32)
    unseen = np.concatenate([np.zeros(len(homes.keys), dtype=np.int64), before.unseen[stays] + 1])
    joined = replace(
        homes, keys=keys[order], home=np.concatenate([homes.home, old.home[stays]])[order],
        absent=np.concatenate([homes.absent, unknown])[order],
    )  # fmt: skip
    return joined, unseen[order]


_Judged = tuple[ShareRange, AffinityTraffic]


def _judge(
    window: SampledWindow,
    layout: RankLayout,
    before: AffinityPlan | None,
    placed: NodeHomes | None,
    limits: AffinityLimits,
    fit: Callable[[NodeHomes], NodeHomes],
) -> tuple[_Judged | None, bool, float | None, NodeHomes | None]:
    """Return what the best way of learning sends, whether that goes on from before, its probability and homes."""
    batches = window.batches
    if batches < MIN_BATCHES:
        return None, before is not None, None if before is None else before.probability, None
    count = _judged_batches(batches)
    entries = max(1.0, len(window.rows.rows) / batches)
    oldest = max(0, batches - count - max(MIN_BATCHES, int(_DIVIDED_ENTRIES / entries)))
    learnt, newest = window.of_batches(oldest, batches - count), window.of_batches(batches - count, batches)
    current = _current(learnt.rows.keys, layout, placed)
    ways: list[tuple[bool, float | None]] = [(False, each) for each in PROBABILITIES]
    if before is not None:
        ways.insert(0, (True, before.probability))
    best: tuple[float, _Judged, bool, float | None, NodeHomes] | None = None
    for continued, probability in ways:
        homes = fit(
            learn_homes(
                learnt.rows, learnt.batch, current, layout.nodes, replace(limits, probability=probability),
                before.homes if continued and before is not None else None, learnt.costs,
            )
        )  # fmt: skip
        judged = _range_of(newest, homes, layout)
        # Rows per batch: what crosses, and over the horizon what the moves send.
        moves = float(learnt.costs.min_gain[homes.home != current].sum(dtype=np.float64))
        cost = judged[0].expected * judged[1].chain_rows / max(1, judged[1].batches) + moves
        margin = 1 - CONTINUE_WITHIN if best is not None and best[2] else 1.0
        if best is None or cost < best[0] * margin:
            best = cost, judged, continued, probability, homes
    assert best is not None  # noqa: S101
    return best[1:]


def _judged_batches(batches: int) -> int:
    return max(1, min(MAX_JUDGED, int(JUDGED_SHARE * batches)))


def _by_user(window: SampledWindow, divided: NodeHomes, layout: RankLayout, *, in_place: bool) -> ShareRange | None:
    """Return the range over the newest batches with users, and homes, learnt from those before them."""
    first = window.batches - _judged_batches(window.batches)
    learnt, newest = window.of_batches(0, first), window.of_batches(first, window.batches)
    homes = divided if in_place else replace(divided, home=rule_nodes(divided.keys, layout))
    users = users_of_window(learnt, homes, layout)
    if users is None:
        return None
    sent, chain = crossing_by_user(users, newest, homes, layout)
    counted = chain > 0
    return _range(float(sent.sum() / max(1e-30, chain.sum())), sent[counted] / chain[counted])


def _range_of(newest: SampledWindow, homes: NodeHomes, layout: RankLayout) -> _Judged:
    """Return the range over batches with a loader that deals, and the traffic of all batches."""
    each = []
    for number in range(newest.batches):
        one = newest.of_batches(number, number + 1)
        each.append(traffic(one.rows, one.batch, homes, layout, newest.row_bytes, one.costs.weight))
    total = AffinityTraffic(
        batches=len(each),
        chain_rows=sum(one.chain_rows for one in each),
        loader_rows=sum(one.loader_rows for one in each),
        row_bytes=newest.row_bytes,
    )
    return _range(total.loader_ratio, np.array([one.loader_ratio for one in each if one.chain_rows])), total


def _range(expected: float, each: Float64Array) -> ShareRange:
    if not len(each):
        return ShareRange(1.0, 1.0, 1.0)
    low, high = (float(value) for value in np.percentile(each, _PERCENTILES))
    return ShareRange(expected, min(low, expected), max(high, expected))
