"""Homes of rows learnt from a window of samples, and samples dealt to nodes.

Samples are first divided by recursive bisection by probabilistic fanout, the Social Hash Partitioner (Kabiljo et al.,
PVLDB 10(11), 2017): a row that ``c`` samples of a side use counts ``1 - (1 - p)**c`` there. Every sample's gain of
changing sides follows from counts by row; the samples of the two sides with the largest gains are exchanged in pairs,
so the sides stay equal. With ``p`` one over the number of batches this is the expected number of touches in a batch; a
larger ``p`` counts rows that many samples share for less. Homes are balanced in rows and load, and move only where that
pays.

Dealing sends samples to nodes in equal numbers, at least cost: greedy by regret, where each sample asks for its
cheapest node with room, and a node that is asked for by too many takes those that would lose most elsewhere. Then pairs
of samples of two nodes are exchanged while that wins: for two nodes the result is optimal, for more no exchange of two
samples improves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from flexd.core.arrays import BoolArray, Float32Array, Float64Array, Int64Array, first_of_run, matches, places_of_runs
from flexd.planner.affinity.window import RowCosts, SampleRows

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


_SWEEPS = 3


def _equal_shares(sizes: Int64Array, nodes: int) -> Int64Array:
    """Return int64 [groups, nodes]: samples of each group for each node, equal but for a remainder.

    The nodes that get one more follow one another from group to group, so that the sums over groups are equal too.
    """
    spare = sizes % nodes
    first = (np.cumsum(spare) - spare) % nodes
    turn = (np.arange(nodes)[None, :] - first[:, None]) % nodes
    return (sizes // nodes)[:, None] + (turn < spare[:, None])


def deal(costs: Float32Array, groups: Int64Array, sweeps: int = _SWEEPS) -> Int64Array:
    """Return int64 [samples]: the node of each sample.

    Args:
        costs: float32 [samples, nodes] of training a sample in a node.
        groups: int64 [samples], from 0: samples of each group are dealt in equal numbers, as a rank deals its own.
        sweeps: of exchanging pairs, at most.
    """
    shares = _equal_shares(np.bincount(groups, minlength=1), costs.shape[1])
    to = _by_regret(costs, groups, shares)
    _exchange_pairs(costs, groups, to, sweeps)
    return to


def _by_regret(costs: Float32Array, groups: Int64Array, room: Int64Array) -> Int64Array:
    samples, nodes = costs.shape
    to = np.full(samples, -1, dtype=np.int64)
    waiting = np.arange(samples)
    # A node that refuses is full, so this ends after as many rounds as nodes.
    while len(waiting):
        here = groups[waiting]
        open_costs = np.where(room[here] > 0, costs[waiting], np.inf)
        choice = open_costs.argmin(axis=1)
        two = np.partition(open_costs, 1, axis=1)[:, :2] if nodes > 1 else np.zeros((len(waiting), 2))
        regret = two[:, 1] - two[:, 0]
        bucket = here * nodes + choice
        order = np.lexsort((-regret, bucket))
        position = _position_in_runs(bucket[order])
        taken = order[position < room.reshape(-1)[bucket[order]]]
        to[waiting[taken]] = choice[taken]
        room -= np.bincount(bucket[taken], minlength=room.size).reshape(room.shape)
        left = np.ones(len(waiting), dtype=np.bool_)
        left[taken] = False
        waiting = waiting[left]
    return to


def _exchange_pairs(costs: Float32Array, groups: Int64Array, to: Int64Array, sweeps: int) -> None:
    """Exchange samples between pairs of nodes, within groups, while that lowers the cost; changes ``to``."""
    nodes = costs.shape[1]
    for _ in range(sweeps):
        moved = 0
        for first in range(nodes):
            for second in range(first + 1, nodes):
                moved += _exchange(costs, groups, to, first, second)
        if not moved or nodes == 2:
            break


def _exchange(costs: Float32Array, groups: Int64Array, to: Int64Array, first: int, second: int) -> int:
    leaving, place = [], []
    for source, target in ((first, second), (second, first)):
        at = np.flatnonzero(to == source)
        lost = costs[at, target] - costs[at, source]
        order = np.lexsort((lost, groups[at]))
        leaving.append((at[order], lost[order]))
        group = groups[at[order]]
        # Samples of the two nodes with the same group and position are a pair.
        place.append(group * np.int64(len(to) + 1) + _position_in_runs(group))
    _, left, right = np.intersect1d(place[0], place[1], assume_unique=True, return_indices=True)
    wins = leaving[0][1][left] + leaving[1][1][right] < -1e-6
    to[leaving[0][0][left[wins]]], to[leaving[1][0][right[wins]]] = second, first
    return int(wins.sum())


def _position_in_runs(values: Int64Array) -> Int64Array:
    """Return the position of each of the sorted values in its run of equal ones."""
    starts = np.flatnonzero(first_of_run(values))
    return places_of_runs(0, np.diff(starts, append=len(values)))


_BISECTION_ROUNDS = 20
# Share of the samples that changes sides in a round below which it ends.
_SETTLED = 0.002


def _bisected(matrix: csr_matrix, nodes: int, probability: float, seed: int, weight: Float32Array) -> Int64Array:
    """Return int64 [samples]: nodes of the samples, in equal numbers, such that few rows are used in several.

    Args:
        matrix: float32 [samples, rows], a one for each row of a sample.
        probability: of one use of a row to count, 0 to 1.
        weight: float32 [rows], what a row costs where it is used.
    """
    to = np.zeros(matrix.shape[0], dtype=np.int64)
    # A row of one sample costs the same wherever that is trained.
    shared = np.flatnonzero(np.bincount(matrix.indices, minlength=matrix.shape[1]) > 1)
    if len(shared) < matrix.shape[1]:
        matrix, weight = matrix[:, shared], weight[shared]
    rng = np.random.default_rng(seed)

    def divide(samples: Int64Array, first: int, nodes: int) -> None:
        if nodes == 1 or not len(samples):
            to[samples] = first
            return
        right = nodes // 2
        side = _bisect(matrix[samples], weight, right / nodes, probability, rng)
        divide(samples[~side], first, nodes - right)
        divide(samples[side], first + nodes - right, right)

    divide(np.arange(matrix.shape[0]), 0, nodes)
    return to


def _bisect(
    matrix: csr_matrix, weight: Float32Array, share: float, probability: float, rng: np.random.Generator
) -> BoolArray:
    count = matrix.shape[0]
    side = np.zeros(count, dtype=np.bool_)
    side[rng.permutation(count)[: round(share * count)]] = True
    stays = np.float32(max(1e-6, 1 - probability))
    transposed = matrix.T
    uses = transposed @ np.ones(count, dtype=np.float32)
    for _ in range(_BISECTION_ROUNDS):
        on_right = transposed @ side.astype(np.float32)
        # What leaving one side wins, and arriving on the other costs; of the sample's own use there is one less.
        left_log, right_log = stays ** (uses - on_right), stays**on_right
        gains = np.stack([left_log / stays - right_log, right_log / stays - left_log], axis=1)
        gains *= weight[:, None]
        gain_left, gain_right = (matrix @ gains.astype(np.float32)).T
        gain = np.where(side, gain_right, gain_left)
        order_left = np.flatnonzero(~side)
        order_left = order_left[np.argsort(-gain[order_left], kind="stable")]
        order_right = np.flatnonzero(side)
        order_right = order_right[np.argsort(-gain[order_right], kind="stable")]
        pairs = min(len(order_left), len(order_right))
        wins = int(np.count_nonzero(gain[order_left[:pairs]] + gain[order_right[:pairs]] > 0))
        # Gains hold for one change at a time: half are changed at once, so that neighbours do not pass one another.
        chosen = rng.random(wins) < 0.5
        side[order_left[:wins][chosen]], side[order_right[:wins][chosen]] = True, False
        if np.count_nonzero(chosen) <= _SETTLED * count:
            break
    return side


ROW_SLACK, LOAD_SLACK = 0.05, 0.2
"""Rows (and their bytes) of a node, and touches of its rows, above the mean, as share of it."""
# Over the weights: rows that leave a node for their bytes may bring another above its number of rows.
_LEVEL_ROUNDS = 8


def _choose_homes(touches: Float32Array, current: Int64Array, costs: RowCosts) -> Int64Array:
    """Return int64 [rows]: the node of each row's home: the one that touches it most, within the limits.

    A row moves if its touches by the new node are ``costs.min_gain`` more than those by its node of now. A node that
    then has too many rows, too many of their bytes, or too much load (touches by any node of its rows), gives up those
    that lose least, a row to its next best node with room. No limit is below what the node has now.

    Args:
        touches: float32 [rows, nodes], expected touches per batch of each row by each node.
        current: int64 [rows], nodes of the homes now.
    """
    rows, nodes = touches.shape
    each = np.arange(rows)
    best = touches.argmax(axis=1)
    pays = touches[each, best] - touches[each, current] > costs.min_gain
    home = np.where(pays, best, current)
    load, ones = touches.sum(axis=1, dtype=np.float64), np.ones(rows)
    stored = costs.stored_bytes.astype(np.float64)
    shares = ((ones, ROW_SLACK), (load, LOAD_SLACK), (ones, ROW_SLACK), (stored, ROW_SLACK))
    bounds = [
        (weight, np.maximum((1 + slack) * weight.sum() / nodes, np.bincount(current, weights=weight, minlength=nodes)))
        for weight, slack in shares
    ]
    for _ in range(_LEVEL_ROUNDS):
        for weight, limit in bounds:
            level(touches, home, weight, limit)
        if all(_is_level(home, weight, limit) for weight, limit in bounds):
            break
    return home


def _is_level(home: Int64Array, weight: Float64Array, limit: Float64Array) -> bool:
    """Return whether no node is above its limit by more than the heaviest row."""
    held = np.bincount(home, weights=weight, minlength=len(limit))
    return bool((held <= limit + weight.max(initial=0.0)).all())


def level(gains: Float32Array, home: Int64Array, weight: Float64Array, limit: Float64Array) -> None:
    """Move rows of nodes above their limit to nodes with room, those first that lose least by weight; changes ``home``.

    Args:
        gains: float32 [rows, nodes], of having a row in a node.
        weight: float64 [rows].
        limit: float64 [nodes], sum of weights. Where rows are too heavy to fit anywhere, a node stays above it.
    """
    nodes = gains.shape[1]
    for _ in range(2 * nodes):
        held = np.bincount(home, weights=weight, minlength=nodes)
        room = limit - held
        over = np.flatnonzero(room < 0)
        if not len(over):
            return
        for node in over:
            mine = np.flatnonzero(home == node)
            elsewhere = np.where(room > 0, gains[mine], -np.inf)
            elsewhere[:, node] = -np.inf
            target = elsewhere.argmax(axis=1)
            lost = gains[mine, node] - elsewhere[np.arange(len(mine)), target]
            if not np.isfinite(lost).any():
                return
            order = np.argsort(lost / np.maximum(weight[mine], 1e-30), kind="stable")
            order = order[np.isfinite(lost[order]) & (weight[mine[order]] > 0)]
            before = np.cumsum(weight[mine[order]]) - weight[mine[order]]
            leaving = order[before < -room[node]]
            for to in np.unique(target[leaving]):
                going = leaving[target[leaving] == to]
                fits = going[np.cumsum(weight[mine[going]]) <= room[to]]
                home[mine[fits]] = to
                room[to] -= weight[mine[fits]].sum()
                room[node] += weight[mine[fits]].sum()


FROM_HOMES = 0.0
"""As ``probability`` of ``learn_homes``: begin at the homes of now instead of with a bisection (``_gathered``)."""
_GATHERINGS = 8


@dataclass(frozen=True)
class NodeHomes:
    """Nodes of rows, and how often each node touches them.

    Attributes:
        keys: int64 [rows], ascending.
        home: int64 [rows], the node of each row's home.
        absent: float32 [rows, nodes], probability that no other sample of a node's share of a batch uses the row.
        crossing: expected rows per batch that cross between nodes, in the window, by their weights.
    """

    keys: Int64Array
    home: Int64Array
    absent: Float32Array
    crossing: float

    @property
    def nodes(self) -> int:
        return int(self.absent.shape[1])

    def home_of(self, keys: Int64Array, by_rule: Int64Array) -> Int64Array:
        """Return int64 [n]: the node of each key's home, ``by_rule`` where the key is not known."""
        home = by_rule.copy()
        known, at = matches(self.keys, keys)
        home[known] = self.home[at]
        return home

    def row_costs(self, keys: Int64Array, by_rule: Int64Array) -> Float32Array:
        """Return float32 [n, nodes]: rows that cross if one more sample with that key is trained in a node."""
        costs = np.ones((len(keys), self.nodes), dtype=np.float32)
        known, at = matches(self.keys, keys)
        costs[known] = self.absent[at]
        costs[np.arange(len(keys)), self.home_of(keys, by_rule)] = 0
        return costs


def learn_homes(
    window: SampleRows, batch: Int64Array, current: Int64Array, nodes: int, costs: RowCosts,
    probability: float | None = None, start: NodeHomes | None = None,
    *, rounds: int = 4, sweeps: int = 3, seed: int = 0,
) -> NodeHomes:  # fmt: skip
    """Return homes for a window of samples, by alternating: samples to nodes by the rows they use, rows to the node
    that touches them most.

    Args:
        window: samples; its keys are the rows.
        batch: int64 [samples], from 0, the global batch of each sample.
        current: int64 [rows], nodes of the homes now.
        probability: of a use to count in the bisection; None: one over the number of batches, what a batch touches;
            ``FROM_HOMES``: no bisection.
        start: homes learnt before, from which to go on; None: begin with a bisection of the window.
        rounds: of alternating between dealing and homes, at most; it ends where a round wins nothing.
        sweeps: of exchanging pairs of samples in each dealing, at most.
        seed: of the bisection. Equal inputs give equal homes.
    """
    matrix = window.matrix()
    if start is None and probability == FROM_HOMES:
        to = _gathered(matrix, batch, current, nodes, seed, costs.weight)
    elif start is None:
        probability = probability or 1 / (int(batch.max(initial=0)) + 1)
        to = _named_as_homes(_bisected(matrix, nodes, probability, seed, costs.weight), matrix, current, nodes)
    else:
        row_costs = start.row_costs(window.keys, current) * costs.weight[:, None]
        to = deal(np.asarray(matrix @ row_costs, dtype=np.float32), batch, sweeps)
    return _Alternating(matrix, batch, current, nodes, costs).run(window.keys, to, rounds, sweeps)


def _gathered(
    matrix: csr_matrix, batch: Int64Array, current: Int64Array, nodes: int, seed: int, weight: Float32Array
) -> Int64Array:
    """Return int64 [samples]: nodes of the samples, by turns: samples go to the node with most of their rows, in equal
    numbers of each batch, and rows to the node with most of their samples.

    Args:
        weight: float32 [rows], of a row.
    """
    home, rng = current, np.random.default_rng(seed)
    each = np.eye(nodes, dtype=np.float32)
    to = np.zeros(matrix.shape[0], dtype=np.int64)
    for turn in range(_GATHERINGS):
        there = each[home]
        if turn == 0:
            # Homes by rule are even: samples of equal rows must find one another.
            there = there + np.float32(0.3) * rng.random(there.shape, dtype=np.float32)
        there = there * weight[:, None]
        to = deal(-np.asarray(matrix @ there, dtype=np.float32), batch, 0)
        home = np.asarray(matrix.T @ each[to]).argmax(axis=1)
    return to


@dataclass(frozen=True)
class _Alternating:
    """Samples are dealt by homes, and homes chosen by what nodes then touch; the best of all rounds counts."""

    matrix: csr_matrix
    batch: Int64Array
    current: Int64Array
    nodes: int
    costs: RowCosts

    @cached_property
    def other_batch(self) -> np.float32:
        """Probability that one use is not in a given batch. A window of one batch has all its uses in it."""
        return np.float32(max(1e-6, 1 - 1 / (int(self.batch.max(initial=0)) + 1)))

    def run(self, keys: Int64Array, to: Int64Array, rounds: int, sweeps: int) -> NodeHomes:
        best = learnt = self._homes(keys, to)
        for _ in range(rounds):
            row_costs = learnt.absent.copy()
            row_costs[np.arange(len(keys)), learnt.home] = 0
            row_costs *= self.costs.weight[:, None]
            costs = np.asarray(self.matrix @ row_costs, dtype=np.float32)
            # The sample's own use is in what its node was found to touch.
            costs[np.arange(len(to)), to] /= self.other_batch
            to = deal(costs, self.batch, sweeps)
            learnt = self._homes(keys, to)
            if learnt.crossing >= best.crossing:
                break
            best = learnt
        return best

    def _homes(self, keys: Int64Array, to: Int64Array) -> NodeHomes:
        absent = self.other_batch ** np.asarray(self.matrix.T @ _one_of(to, self.nodes), dtype=np.float32)
        touches = (1 - absent) * self.costs.weight[:, None]
        home = _choose_homes(touches, self.current, self.costs)
        at_home = touches[np.arange(len(home)), home].sum(dtype=np.float64)
        return NodeHomes(keys, home, absent, float(touches.sum(dtype=np.float64) - at_home))


def _one_of(to: Int64Array, nodes: int) -> Float32Array:
    """Return float32 [samples, nodes] with a one in the node of each sample."""
    chosen = np.zeros((len(to), nodes), dtype=np.float32)
    chosen[np.arange(len(to)), to] = 1
    return chosen


def _named_as_homes(to: Int64Array, matrix: csr_matrix, current: Int64Array, nodes: int) -> Int64Array:
    """Return the same division with nodes named such that most uses are in the node of the row's home now."""
    uses = matrix.T @ _one_of(to, nodes)
    at_home = np.stack([uses[current == node].sum(axis=0, dtype=np.float64) for node in range(nodes)], axis=1)
    name = np.full(nodes, -1)
    for _ in range(nodes):
        division, node = np.unravel_index(at_home.argmax(), at_home.shape)
        name[division] = node
        at_home[division], at_home[:, node] = -np.inf, -np.inf
    return np.asarray(name[to], dtype=np.int64)
