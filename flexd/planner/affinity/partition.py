"""Homes of rows learnt from a window of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flexd.planner.affinity.bisection import bisect
from flexd.planner.affinity.dealing import deal
from flexd.planner.affinity.homes import choose_homes
from flexd.planner.affinity.sample_rows import SampleRows

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

FROM_HOMES = 0.0
"""As ``AffinityLimits.probability``: begin at the homes of now instead of with a bisection (``gather_samples``)."""
_GATHERINGS = 8


@dataclass(frozen=True)
class AffinityLimits:
    """Bounds of the homes that a partitioning may choose.

    Attributes:
        row_slack: rows of a node above the mean, as share of it.
        load_slack: touches of a node's rows above the mean, as share of it.
        min_gain: touches a batch that a moved row must win: what a move costs in rows over the batches it will serve
            (``RowCosts.min_gain`` where rows differ).
        rounds: of alternating between dealing and homes, at most; it ends where a round wins nothing.
        probability: of a use to count in the bisection; None: one over the number of batches, what a batch touches;
            ``FROM_HOMES``: no bisection.
        seed: of the bisection. Equal inputs give equal homes.
        sweeps: of exchanging pairs of samples in each dealing, at most.
    """

    row_slack: float = 0.05
    load_slack: float = 0.2
    min_gain: float = 1e-3
    rounds: int = 4
    probability: float | None = None
    seed: int = 0
    sweeps: int = 3

    def __post_init__(self) -> None:
        if min(self.row_slack, self.load_slack, self.min_gain) < 0 or self.rounds < 0:
            raise ValueError(f"limits must not be negative: {self}")


@dataclass(frozen=True)
class RowCosts:
    """What rows cost, by row of a window.

    Attributes:
        weight: float32 [rows], bytes of a row that crosses, over ``WireBytes.row``.
        min_gain: float32 [rows], weighted touches a batch that a move must win.
        stored_bytes: float32 [rows], memory of a row with its optimizer state.
    """

    weight: Float32Array
    min_gain: Float32Array
    stored_bytes: Float32Array

    def of(self, chosen: Int64Array) -> RowCosts:
        """Return the costs of the chosen rows, in that order."""
        return RowCosts(self.weight[chosen], self.min_gain[chosen], self.stored_bytes[chosen])


@dataclass(frozen=True)
class NodeHomes:
    """Nodes of rows, and how often each node touches them.

    Attributes:
        keys: int64 [rows], ascending.
        home: int64 [rows], the node of each row's home.
        absent: float32 [rows, nodes], probability that no other sample of a node's share of a batch uses the row.
        crossing: expected rows a batch that cross between nodes, in the window, by their weights.
        moved: rows whose home is not where it was.
    """

    keys: Int64Array
    home: Int64Array
    absent: Float32Array
    crossing: float
    moved: int

    @property
    def nodes(self) -> int:
        return int(self.absent.shape[1])

    def home_of(self, keys: Int64Array, by_rule: Int64Array) -> Int64Array:
        """Return int64 [n]: the node of each key's home, ``by_rule`` where the key is not known."""
        at, known = self._find(keys)
        return np.where(known, self.home[at], by_rule) if len(self.keys) else by_rule

    def row_costs(self, keys: Int64Array, by_rule: Int64Array) -> Float32Array:
        """Return float32 [n, nodes]: rows that cross if one more sample with that key is trained in a node."""
        costs = np.ones((len(keys), self.nodes), dtype=np.float32)
        if len(self.keys):
            at, known = self._find(keys)
            costs[known] = self.absent[at[known]]
        costs[np.arange(len(keys)), self.home_of(keys, by_rule)] = 0
        return costs

    def _find(self, keys: Int64Array) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        at = np.minimum(np.searchsorted(self.keys, keys), max(0, len(self.keys) - 1))
        return at, self.keys[at] == keys if len(self.keys) else np.zeros(len(keys), dtype=np.bool_)


def learn_homes(
    window: SampleRows, batch: Int64Array, current: Int64Array, nodes: int, limits: AffinityLimits | None = None,
    start: NodeHomes | None = None, rows: RowCosts | None = None,
) -> NodeHomes:  # fmt: skip
    """Return homes for a window of samples, by alternating: samples to nodes by the rows they use, rows to the node
    that touches them most.

    Args:
        window: samples; its keys are the rows.
        batch: int64 [samples], from 0, the global batch of each sample.
        current: int64 [rows], nodes of the homes now.
        start: homes learnt before, from which to go on; None: begin with a bisection of the window.
        rows: what rows cost where they differ; None: all alike.

    Raises:
        ValueError: the arrays do not fit one another, or a home is in no node.
    """
    limits = limits or AffinityLimits()
    if batch.shape != (len(window),) or current.shape != (len(window.keys),):
        raise ValueError(
            f"{len(batch)} batches of {len(window)} samples, {len(current)} homes of {len(window.keys)} rows"
        )
    if len(current) and not 0 <= current.min() <= current.max() < nodes:
        raise ValueError(f"homes are in nodes {current.min()} to {current.max()}, of {nodes}")
    matrix = window.matrix()
    if rows is not None and len(rows.weight) != len(window.keys):
        raise ValueError(f"costs of {len(rows.weight)} rows for {len(window.keys)}")
    alternating = _Alternating(matrix, batch, current, nodes, limits, rows)
    weight = None if rows is None else rows.weight
    if start is None and limits.probability == FROM_HOMES:
        to = gather_samples(matrix, batch, current, nodes, limits.seed, weight)
    elif start is None:
        probability = limits.probability or 1 / (int(batch.max(initial=0)) + 1)
        to = named_as_homes(bisect(matrix, nodes, probability, limits.seed, weight), matrix, current, nodes)
    else:
        costs = start.row_costs(window.keys, current)
        if weight is not None:
            costs *= weight[:, None]
        to = deal(np.asarray(matrix @ costs, dtype=np.float32), batch, limits.sweeps)
    return alternating.run(window.keys, to)


def gather_samples(
    matrix: csr_matrix, batch: Int64Array, current: Int64Array, nodes: int, seed: int = 0,
    weight: Float32Array | None = None,
) -> Int64Array:  # fmt: skip
    """Return int64 [samples]: nodes of the samples, by turns: samples go to the node with most of their rows, in equal
    numbers of each batch, and rows to the node with most of their samples.

    Args:
        weight: float32 [rows], of a row; None: all alike.
    """
    home, rng = current, np.random.default_rng(seed)
    each = np.eye(nodes, dtype=np.float32)
    to = np.zeros(matrix.shape[0], dtype=np.int64)
    for turn in range(_GATHERINGS):
        there = each[home]
        if turn == 0:
            # Homes by rule are even: samples of equal rows must find one another.
            there = there + np.float32(0.3) * rng.random(there.shape, dtype=np.float32)
        if weight is not None:
            there = there * weight[:, None]
        to = deal(-np.asarray(matrix @ there, dtype=np.float32), batch, 0)
        home = np.asarray(matrix.T @ each[to]).argmax(axis=1)
    return to


class _Alternating:
    """Samples are dealt by homes, and homes chosen by what nodes then touch; the best of all rounds counts."""

    def __init__(
        self, matrix: csr_matrix, batch: Int64Array, current: Int64Array, nodes: int, limits: AffinityLimits,
        rows: RowCosts | None = None,
    ) -> None:  # fmt: skip
        self.rows = rows
        self.matrix, self.batch, self.current, self.nodes, self.limits = matrix, batch, current, nodes, limits
        self.transposed = matrix.T
        # Of one use: not in a given batch. A window of one batch has all its uses in it.
        self.other_batch = np.float32(max(1e-6, 1 - 1 / (int(batch.max(initial=0)) + 1)))

    def run(self, keys: Int64Array, to: Int64Array) -> NodeHomes:
        best = learnt = self._homes(keys, to)
        for _ in range(self.limits.rounds):
            row_costs = learnt.absent.copy()
            row_costs[np.arange(len(keys)), learnt.home] = 0
            if self.rows is not None:
                row_costs *= self.rows.weight[:, None]
            costs = np.asarray(self.matrix @ row_costs, dtype=np.float32)
            # The sample's own use is in what its node was found to touch.
            costs[np.arange(len(to)), to] /= self.other_batch
            to = deal(costs, self.batch, self.limits.sweeps)
            learnt = self._homes(keys, to)
            if learnt.crossing >= best.crossing:
                break
            best = learnt
        return best

    def _homes(self, keys: Int64Array, to: Int64Array) -> NodeHomes:
        chosen = np.zeros((len(to), self.nodes), dtype=np.float32)
        chosen[np.arange(len(to)), to] = 1
        absent = self.other_batch ** np.asarray(self.transposed @ chosen, dtype=np.float32)
        touches, limits, rows = 1 - absent, self.limits, self.rows
        if rows is not None:
            touches *= rows.weight[:, None]
        home = choose_homes(
            touches,
            self.current,
            min_gain=limits.min_gain if rows is None else rows.min_gain,
            row_slack=limits.row_slack,
            load_slack=limits.load_slack,
            row_bytes=None if rows is None else rows.stored_bytes,
        )
        at_home = touches[np.arange(len(home)), home].sum(dtype=np.float64)
        crossing = float(touches.sum(dtype=np.float64) - at_home)
        return NodeHomes(keys, home, absent, crossing, int(np.count_nonzero(home != self.current)))


def named_as_homes(to: Int64Array, matrix: csr_matrix, current: Int64Array, nodes: int) -> Int64Array:
    """Return the same division with nodes named such that most uses are in the node of the row's home now."""
    chosen = np.zeros((len(to), nodes), dtype=np.float32)
    chosen[np.arange(len(to)), to] = 1
    uses = matrix.T @ chosen
    at_home = np.stack([uses[current == node].sum(axis=0, dtype=np.float64) for node in range(nodes)], axis=1)
    name = np.full(nodes, -1)
    for _ in range(nodes):
        division, node = np.unravel_index(at_home.argmax(), at_home.shape)
        name[division] = node
        at_home[division], at_home[:, node] = -np.inf, -np.inf
    return np.asarray(name[to], dtype=np.int64)
