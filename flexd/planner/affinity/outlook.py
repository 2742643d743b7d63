"""Homes and dealing kept up with the stream: learnt from the co-access sample, again and again, from where they are;
and what they would win, in bytes between nodes and in sentences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from flexd.core import units
from flexd.core.arrays import Float32Array, Float64Array, Int64Array
from flexd.core.node_map import NodeMap
from flexd.core.placement import RankLayout
from flexd.planner.affinity.partition import FROM_HOMES, NodeHomes, deal, learn_homes, level
from flexd.planner.affinity.window import SampledWindow, SampleRows, sorted_distinct
from flexd.planner.model.cost import PredictedRange
from flexd.sketch.coaccess import NO_USER

MIN_SAVING = 0.02
"""Share of the chain's bytes between nodes below which affinity does not pay."""
# Samples above the mean that a node may have, as share of the mean. A user is not divided, so one with more samples
# than that is where her rows are.
_USER_SLACK = 0.02
NodesOfSamples = Callable[[SampledWindow, Int64Array], Int64Array]
"""(one batch, the nodes that read its samples) -> the nodes that train them."""


def rule_nodes(keys: Int64Array, layout: RankLayout) -> Int64Array:
    """Return int64 [n]: the node of each key's home rank by the rule ``key % world_size``."""
    return keys % layout.world_size // layout.local_ranks


def crossing_rows(samples: SampleRows, to: Int64Array, home: Int64Array, weight: Float32Array) -> float:
    """Return the rows of one batch that cross: the distinct rows of each node that are not at home there.

    Args:
        to: int64 [samples], the node that trains it.
        home: int64 [rows], the node of the home of each of ``samples.keys``.
        weight: float32 [rows], of a row that crosses.
    """
    node, row = np.divmod(
        sorted_distinct(to[samples.samples] * np.int64(len(samples.keys)) + samples.rows), len(samples.keys)
    )
    return float(weight[row[home[row] != node]].sum(dtype=np.float64))


def crossings(
    window: SampledWindow,
    homes: NodeHomes,
    layout: RankLayout,
    node_of: NodesOfSamples,
) -> tuple[Float64Array, Float64Array]:
    """Return (float64 [batches], float64 [batches]): rows that cross, by weight, with these homes, and those of the
    chain with homes by rule and samples trained where they are read.

    Samples of a batch are read by the ranks in turn.

    Args:
        node_of: of the samples.
    """
    sent, chain = np.zeros((2, window.batches))
    for number in range(window.batches):
        one = window.of_batches(number, number + 1)
        read_in = rule_nodes(np.arange(len(one.rows)), layout)
        by_rule, weight = rule_nodes(one.rows.keys, layout), one.costs.weight
        home = homes.home_of(one.rows.keys, by_rule)
        sent[number] = crossing_rows(one.rows, node_of(one, read_in), home, weight)
        chain[number] = crossing_rows(one.rows, read_in, by_rule, weight)
    return sent, chain


def dealt_nodes(homes: NodeHomes, layout: RankLayout) -> NodesOfSamples:
    """Return ``node_of`` of a loader that deals. It knows the rows of a sample and what was learnt of them, not the
    rest of the batch."""

    def node_of(one: SampledWindow, _: Int64Array) -> Int64Array:
        row_costs = homes.row_costs(one.rows.keys, rule_nodes(one.rows.keys, layout)) * one.costs.weight[:, None]
        return deal(np.asarray(one.rows.matrix() @ row_costs, dtype=np.float32), one.batch)

    return node_of


def users_of_window(window: SampledWindow, homes: NodeHomes, layout: RankLayout) -> NodeMap | None:
    """Return the node of each user whose samples the window has: where their rows cross least; None without ids of
    users."""
    known = np.flatnonzero(window.user != NO_USER)
    if not len(known):
        return None
    samples, nodes = window.rows.select(known), homes.nodes
    ids, of = np.unique(window.user[known], return_inverse=True)
    costs = samples.matrix() @ homes.row_costs(samples.keys, rule_nodes(samples.keys, layout))
    by_user = np.stack([np.bincount(of.reshape(-1), costs[:, node], len(ids)) for node in range(nodes)], axis=1)
    count = np.bincount(of.reshape(-1), minlength=len(ids)).astype(np.float64)
    node = by_user.argmin(axis=1)
    level(-by_user.astype(np.float32), node, count, np.full(nodes, (1 + _USER_SLACK) * count.sum() / nodes))
    return NodeMap(ids, node, layout.nodes)


def nodes_of_users(users: NodeMap) -> NodesOfSamples:
    """Return ``node_of`` of producers that send a user's samples to her node. Samples of no user are where they are
    read, those of unknown users as ``NodeMap`` says."""
    return lambda one, read_in: np.where(one.user == NO_USER, read_in, users.node_of(one.user))


PROBABILITIES = (None, 0.5, FROM_HOMES)
"""Of a use to count in the bisection; the newest batches decide (``learn_homes``)."""
MIN_BATCHES = 4
JUDGED_SHARE, MAX_JUDGED = 0.25, 8
"""Newest batches that judge what was learnt from those before them."""
CONTINUE_WITHIN = 0.01
"""Homes are learnt on from those before unless a new division saves this share more, its moves counted."""
# Rows of samples up to which the whole window is divided anew. A larger one is divided by its newest batches of about
# as many; the others are dealt by what those say, which takes two passes over them.
_DIVIDED_ENTRIES = 2_000_000
_PERCENTILES = (5.0, 95.0)
FORGOTTEN_AFTER = 8
"""Plans after which a re-homed row that the window does not hold any more goes back to where its rule puts it."""


@dataclass(frozen=True)
class AffinityForecast:
    """The bytes that homes and dealing by affinity are expected to send between nodes.

    Shares are of the chain's bytes, with the 5th to the 95th percentile over batches; None if there are too few batches
    to tell.

    Attributes:
        loader: share left with a loader that sends each sample to its node.
        dealing_loader: the same with every row where its rule puts it: dealing alone.
        placed: the same with every row where it is now; as ``dealing_loader`` if none has moved.
        by_user: share left with each user's samples in her node; None without ids of users too.
        chain_bytes: the chain's, in a step of the whole job.
        rehomed_rows: rows that are not where their rule puts them.
        move_bytes: that moving rows sends once, values and optimizer state.
    """

    loader: PredictedRange | None = None
    dealing_loader: PredictedRange | None = None
    placed: PredictedRange | None = None
    by_user: PredictedRange | None = None
    chain_bytes: float | None = None
    rehomed_rows: int = 0
    move_bytes: float = 0.0

    @property
    def pays(self) -> bool:
        """True if even the high end of the range saves a share of the chain's bytes; False means "no gain expected"."""
        return self.loader is not None and self.loader.expected <= 1 - MIN_SAVING and self.loader.high < 1

    @property
    def moves_pay(self) -> bool:
        """True if re-homed rows save a share of the chain's bytes beside dealing alone."""
        alone, both = self.dealing_loader, self.loader
        return alone is not None and both is not None and alone.expected - both.expected >= MIN_SAVING


@dataclass(frozen=True)
class AffinityPlan:
    """Homes by node, and what they are expected to send.

    Attributes:
        homes: of the sampled rows, and of rows moved before that stay; all others are where their rule puts them.
        unseen: int64 [rows of ``homes``], plans since the window held the row.
        moves: int64 [rows], keys of the rows that move now, ascending.
        users: the node of each user, by where rows are to live: ``homes`` if they are in place, else where their rule
            puts them. None without ids of users.
        batch_samples: of a batch of the window.
        continued: whether it went on from the homes before.
        probability: of the bisection that was best; the next call may start with it.
    """

    homes: NodeHomes
    unseen: Int64Array
    moves: Int64Array
    forecast: AffinityForecast
    users: NodeMap | None
    batch_samples: int
    continued: bool
    probability: float | None


def plan_affinity(
    window: SampledWindow,
    layout: RankLayout,
    before: AffinityPlan | None = None,
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
        fit: returns homes with the moves that there is room for.
    """
    rows = window.rows
    placed = before.homes if in_place and before is not None else None
    current = _current(rows.keys, layout, placed)
    judged = _judge(window, layout, before, placed, fit)
    learn = partial(learn_homes, rows, window.batch, current, layout.nodes, window.costs, judged.probability)
    if len(rows.rows) > _DIVIDED_ENTRIES and judged.homes is not None:
        homes = fit(learn(judged.homes, rounds=1, sweeps=1))
    else:
        homes = fit(learn(before.homes if judged.continued and before is not None else None))
    at = np.flatnonzero(homes.home != current)
    moves, move_bytes = homes.keys[at], float(window.costs.stored_bytes[at].sum(dtype=np.float64))
    users = users_of_window(window, homes if in_place else replace(homes, home=current), layout)
    forecast = AffinityForecast()
    if judged.homes is not None:
        newest = window.of_batches(window.batches - _judged_batches(window.batches), window.batches)
        # Homes that know no row: all are where their rule puts them.
        none = np.empty(0, dtype=np.int64)
        alone = NodeHomes(none, none, np.empty((0, layout.nodes), dtype=np.float32), 0.0)
        dealing_loader = _range(*crossings(newest, alone, layout, dealt_nodes(alone, layout)))
        forecast = AffinityForecast(
            loader=_range(judged.sent, judged.chain),
            dealing_loader=dealing_loader,
            placed=dealing_loader
            if placed is None
            else _range(*crossings(newest, placed, layout, dealt_nodes(placed, layout))),
            by_user=_by_user(window, judged.homes, layout, in_place=in_place),
            chain_bytes=float(judged.chain.mean()) * window.row_bytes,
        )
    unseen = np.zeros(len(homes.keys), dtype=np.int64)
    if placed is not None and before is not None:
        homes, unseen = _with_unseen(homes, before, layout)
    rehomed_rows = int(np.count_nonzero(homes.home != rule_nodes(homes.keys, layout)))
    forecast = replace(forecast, rehomed_rows=rehomed_rows, move_bytes=move_bytes)
    return AffinityPlan(
        homes, unseen, moves, forecast, users, window.batch_samples, judged.continued, judged.probability
    )


def _current(keys: Int64Array, layout: RankLayout, placed: NodeHomes | None) -> Int64Array:
    rule = rule_nodes(keys, layout)
    return rule if placed is None else placed.home_of(keys, rule)


def _with_unseen(homes: NodeHomes, before: AffinityPlan, layout: RankLayout) -> tuple[NodeHomes, Int64Array]:
    """Add the re-homed rows of the plan before that the window does not hold: they stay where they are, for a while."""
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


@dataclass(frozen=True)
class _Judged:
    """The best way of learning: whether it goes on from before, its probability, its homes, and per newest batch the
    rows that it sends and those of the chain."""

    continued: bool
    probability: float | None
    homes: NodeHomes | None = None
    sent: Float64Array = field(default_factory=lambda: np.empty(0))
    chain: Float64Array = field(default_factory=lambda: np.empty(0))


def _judge(
    window: SampledWindow,
    layout: RankLayout,
    before: AffinityPlan | None,
    placed: NodeHomes | None,
    fit: Callable[[NodeHomes], NodeHomes],
) -> _Judged:
    """Return what the best way of learning sends; without homes if there are too few batches to tell."""
    batches = window.batches
    if batches < MIN_BATCHES:
        return _Judged(before is not None, None if before is None else before.probability)
    count = _judged_batches(batches)
    entries = max(1.0, len(window.rows.rows) / batches)
    oldest = max(0, batches - count - max(MIN_BATCHES, int(_DIVIDED_ENTRIES / entries)))
    learnt, newest = window.of_batches(oldest, batches - count), window.of_batches(batches - count, batches)
    current = _current(learnt.rows.keys, layout, placed)
    ways: list[tuple[NodeHomes | None, float | None]] = [(None, each) for each in PROBABILITIES]
    if before is not None:
        ways.insert(0, (before.homes, before.probability))
    least, best = np.inf, _Judged(False, None)
    for start, probability in ways:
        homes = fit(learn_homes(learnt.rows, learnt.batch, current, layout.nodes, learnt.costs, probability, start))
        sent, chain = crossings(newest, homes, layout, dealt_nodes(homes, layout))
        # Rows per batch: what crosses, and over the horizon what the moves send.
        cost = sent.mean() + float(learnt.costs.min_gain[homes.home != current].sum(dtype=np.float64))
        if cost < least * (1 - CONTINUE_WITHIN if best.continued else 1.0):
            least, best = cost, _Judged(start is not None, probability, homes, sent, chain)
    return best


def _judged_batches(batches: int) -> int:
    return max(1, min(MAX_JUDGED, int(JUDGED_SHARE * batches)))


def _by_user(window: SampledWindow, divided: NodeHomes, layout: RankLayout, *, in_place: bool) -> PredictedRange | None:
    """Return the range over the newest batches with users, and homes, learnt from those before them."""
    first = window.batches - _judged_batches(window.batches)
    learnt, newest = window.of_batches(0, first), window.of_batches(first, window.batches)
    homes = divided if in_place else replace(divided, home=rule_nodes(divided.keys, layout))
    users = users_of_window(learnt, homes, layout)
    return None if users is None else _range(*crossings(newest, homes, layout, nodes_of_users(users)))


def _range(sent: Float64Array, chain: Float64Array) -> PredictedRange:
    """Return what is sent over the chain's, of all batches together and in percentiles over batches."""
    expected, each = float(sent.sum() / max(1e-30, chain.sum())), sent[chain > 0] / chain[chain > 0]
    if not len(each):
        return PredictedRange(1.0, 1.0, 1.0)
    low, high = (float(value) for value in np.percentile(each, _PERCENTILES))
    return PredictedRange(expected, min(low, expected), max(high, expected))


WITHOUT_MOVES = (
    "With rows where they are, a loader that deals would leave {share} of the bytes (flexd.affinity.NodeSampler)."
)

BY_USER = "With each user's samples in her node (flexd affinity users -o FILE.npz) {share} would be left."


@dataclass(frozen=True)
class AffinityOutlook:
    """Affinity of one window of sampled accesses.

    Attributes:
        messages: the outlook in sentences, the verdict first.
    """

    messages: tuple[str, ...]
    forecast: AffinityForecast

    @classmethod
    def first(cls) -> AffinityOutlook:
        """Return the outlook while homes are learnt for the first time."""
        message = "Homes by affinity are being learnt for the first time: the next plan says what they would win."
        return cls((message,), AffinityForecast())

    @classmethod
    def of(cls, plan: AffinityPlan, samples: int, chain_seconds: float | None = None) -> AffinityOutlook:
        """Return the outlook of a plan.

        Args:
            samples: sampled ones.
            chain_seconds: transfer time between nodes of a rank's exchange in a step of the chain, by the prices.
        """
        forecast, by_user = plan.forecast, plan.forecast.by_user
        more = () if by_user is None else (BY_USER.format(share=_share(by_user)),)
        return cls((*_verdict(forecast, samples, MIN_BATCHES * plan.batch_samples, chain_seconds), *more), forecast)


def _verdict(forecast: AffinityForecast, samples: int, needed: int, chain_seconds: float | None) -> tuple[str, ...]:
    loader, dealing = forecast.loader, forecast.dealing_loader
    if loader is None or dealing is None:
        return (
            f"Affinity is not known: {units.count(samples)} samples are held, at least {units.count(needed)} "
            f"({MIN_BATCHES} global batches) are needed. Send sequence_lengths, or raise sketch.coaccess_memory_bytes.",
        )
    if not forecast.pays:
        return (
            f"No gain expected: with homes by affinity and a loader that deals {_share(loader)} of the bytes between "
            f"nodes would be left; at least {units.share(MIN_SAVING)} less are asked for.",
        )
    said = [
        f"With homes by affinity and a loader that deals {_share(loader)} of the bytes between nodes would be left."
    ]
    if chain_seconds is not None:
        saved = max(0.0, (1 - loader.expected) * chain_seconds)
        said.append(
            f"By the prices that is {units.seconds(saved)} of transfer a step less, of which compute may hide a part."
        )
    without = WITHOUT_MOVES.format(share=_share(dealing))
    if not forecast.moves_pay:
        return (*said, "Moving homes wins nothing beside dealing here.", without)
    said.append(
        f"{units.count(forecast.rehomed_rows)} rows would live in another node than by their rule; moving them sends "
        f"{units.size(forecast.move_bytes)} once. planner.rehomed_slots_share lets the daemon move them."
    )
    return (*said, without)


def _share(found: PredictedRange) -> str:
    return f"{units.share(found.expected)} ({units.share(found.low)} to {units.share(found.high)})"
