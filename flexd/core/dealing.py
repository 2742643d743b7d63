"""Deal the samples of a global batch to nodes such that few bytes cross between nodes.

Samples are vertices and rows hyperedges, each joined to a fixed vertex for the node of its home: a row crosses once for
every node that uses it and is not its home. Pairs of samples of two nodes are exchanged while that saves more than
shipping the samples costs, so every rank keeps its batch size and no result is worse than dealing nothing.

Every rank computes the same result from the same arrays: all arithmetic is of integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_SHARES = (0.75, 0.5, 0.0, 0.0)
"""Share of the bytes of a row that one more sample costs in a node where one uses it already, its square where two do,
and so on, sweep by sweep. Above 0 samples gather where others use their rows (the fanout of ``planner.affinity``); 0 is
what crosses."""
_SCALE = 64
"""Units of a byte in gains: shares of bytes are integers too."""
_DEEPEST = 16
"""Samples of a node from which on their number makes no difference."""
_TURNS = 2
"""Exchanges of each two nodes in a sweep."""


@dataclass(frozen=True)
class BatchRows:
    """A global batch, as all ranks know it.

    Attributes:
        offsets: int64 [samples + 1], where the rows of each sample begin in ``rows``.
        rows: int64 [n], any numbers of rows; one that a sample has twice is priced less exactly.
        row_bytes: int64 [n], bytes between nodes of a step that needs the row in a node that is not its home.
        homes: int64 [n], the node of the row's home.
        node: int64 [samples], the node that has read the sample.
        group: int64 [samples], samples of equal group may take each other's place.
        sample_bytes: int64 [samples], of shipping the sample to another node.
    """

    offsets: Int64Array
    rows: Int64Array
    row_bytes: Int64Array
    homes: Int64Array
    node: Int64Array
    group: Int64Array
    sample_bytes: Int64Array


@dataclass(frozen=True)
class Dealt:
    """Where the samples of a batch are trained.

    Attributes:
        to: int64 [samples], nodes.
        bytes_before: of rows between nodes if each sample is trained where it was read.
        bytes_after: of rows between nodes as dealt.
        shipped_bytes: of samples between nodes.
    """

    to: Int64Array
    bytes_before: int
    bytes_after: int
    shipped_bytes: int


def deal_batch(batch: BatchRows, nodes: int) -> Dealt:
    """Return the node of each sample. Every pair of node and group keeps its number of samples.

    Args:
        nodes: number of nodes; ``batch`` has no other.
    """
    dealing = _Dealing(batch, nodes)
    before = dealing.crossing()
    best, best_bytes = dealing.to.copy(), before
    for share in _SHARES:
        dealing.sweep(share)
        if share == 0.0:
            total = dealing.crossing() + dealing.shipped()
            if total < best_bytes:
                best, best_bytes = dealing.to.copy(), total
    shipped = int(batch.sample_bytes[best != batch.node].sum())
    return Dealt(best, before, best_bytes - shipped, shipped)


class _Dealing:
    """Rows that one sample of the batch uses are a constant of the sample, the others are counted by node."""

    def __init__(self, batch: BatchRows, nodes: int) -> None:
        self.batch, self.nodes = batch, nodes
        self.to = batch.node.copy()
        self.at = np.arange(len(self.to))
        sample = np.repeat(self.at, np.diff(batch.offsets))
        _, row, uses = np.unique(batch.rows, return_inverse=True, return_counts=True)
        row = row.reshape(-1)
        shared = uses[row] > 1
        alone = sample[~shared] * nodes + batch.homes[~shared]
        # Sums of float64 are exact: bytes of a batch are below 2**53.
        at_home = np.bincount(alone, batch.row_bytes[~shared], len(self.to) * nodes).astype(np.int64)
        self.alone_at_home = at_home.reshape(-1, nodes)
        self.sample = sample[shared]
        _, first, place = np.unique(row[shared], return_index=True, return_inverse=True)
        self.first_code = place.reshape(-1) * nodes
        """int64 [entries]: where the nodes of the entry's row begin in a flat [rows, nodes]."""
        home, row_bytes = batch.homes[shared][first], batch.row_bytes[shared][first]
        self.away_bytes = row_bytes[:, None] * (np.arange(nodes) != home[:, None])
        """int64 [rows, nodes]: of the row in a node that is not its home."""
        self.offsets = np.concatenate([[0], np.cumsum(np.bincount(self.sample, minlength=len(self.to)))])

    def crossing(self) -> int:
        alone = self.alone_at_home.sum() - self.alone_at_home[self.at, self.to].sum()
        return int(self.away_bytes[self._counts() > 0].sum() + alone)

    def shipped(self) -> int:
        return int(self.batch.sample_bytes[self.to != self.batch.node].sum())

    def sweep(self, share: float) -> None:
        """Exchange samples of each two nodes."""
        powers = np.floor(_SCALE * share ** np.arange(_DEEPEST)).astype(np.int64)
        for turn in range(_TURNS * max(1, self.nodes - 1 + self.nodes % 2)):
            other = _partners(self.nodes, turn)[self.to]
            self._exchange(other, self._gain(other, powers))

    def _counts(self) -> Int64Array:
        """int64 [rows, nodes]: samples of each node that use a row."""
        code = self.first_code + self.to[self.sample]
        return np.bincount(code, minlength=self.away_bytes.size).reshape(self.away_bytes.shape)

    def _gain(self, other: Int64Array, powers: Int64Array) -> Int64Array:
        """int64 [samples]: bytes times ``_SCALE`` that training each sample in its other node saves."""
        counts = self._counts()
        # By row and node first: entries are several times as many. Where no sample is, none leaves.
        leaves = powers[np.minimum(counts - 1, _DEEPEST - 1)] * self.away_bytes
        arrives = powers[np.minimum(counts, _DEEPEST - 1)] * self.away_bytes
        here, there = self.first_code + self.to[self.sample], self.first_code + other[self.sample]
        sums = np.concatenate([[0], np.cumsum(leaves.reshape(-1)[here] - arrives.reshape(-1)[there])])
        alone = self.alone_at_home[self.at, other] - self.alone_at_home[self.at, self.to]
        read = self.batch.node
        ship = self.batch.sample_bytes * ((self.to != read).astype(np.int64) - (other != read))
        gain: Int64Array = sums[self.offsets[1:]] - sums[self.offsets[:-1]] + _SCALE * (alone + ship)
        return gain

    def _exchange(self, other: Int64Array, gain: Int64Array) -> None:
        """Exchange the half of the pairs that win most: gains hold for one exchange at a time."""
        bucket = (self.batch.group * self.nodes + np.minimum(self.to, other)) * 2 + (self.to > other)
        order = np.lexsort((-gain, bucket))
        order = order[(self.to != other)[order]]
        bucket = bucket[order]
        pair = (bucket // 2) * (len(self.to) + 1) + position_in_runs(bucket)
        low, high = bucket % 2 == 0, bucket % 2 == 1
        _, left, right = np.intersect1d(pair[low], pair[high], assume_unique=True, return_indices=True)
        first, second = order[low][left], order[high][right]
        wins = gain[first] + gain[second]
        pays = np.flatnonzero(wins > 0)
        pays = pays[np.argsort(-wins[pays], kind="stable")[: (len(pays) + 1) // 2]]
        first, second = first[pays], second[pays]
        self.to[first], self.to[second] = self.to[second], self.to[first]


def _partners(nodes: int, turn: int) -> Int64Array:
    """Return int64 [nodes]: the node that each is paired with in a turn of a round robin; itself if it has none."""
    players = nodes + nodes % 2
    last, turn = players - 1, turn % max(1, players - 1)
    partner = (2 * turn - np.arange(players)) % max(1, last)
    partner[turn], partner[last] = last, turn
    partner = partner[:nodes]
    return np.where(partner < nodes, partner, np.arange(nodes))


def position_in_runs(values: Int64Array) -> Int64Array:
    """Return the position of each of the sorted values in its run of equal ones."""
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])) if len(values) else values
    return np.arange(len(values)) - np.repeat(starts, np.diff(np.concatenate([starts, [len(values)]])))
