"""Deal the samples of a global batch to nodes such that few bytes cross between nodes.

Samples are vertices and rows hyperedges, each joined to a fixed vertex for the node of its home: a row crosses once for
every node that uses it and is not its home. Pairs of samples of two nodes are exchanged while that saves bytes, so
every rank keeps its batch size and no result is worse than dealing nothing.

A row crosses once for each node that has a sample of it and is not its home, so what a sample adds depends on the
other samples of its node. Rows of one sample alone are a constant of the sample and stay out of the sums.

Every rank computes the same result from the same arrays: all arithmetic is of integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_SHARES = ((0.75, 1), (0.5, 1), (0.0, 2))
"""Share of the bytes of a row that one more sample costs in a node where one uses it already, its square where two do,
and so on, and sweeps with that share. Above 0 samples gather where others use their rows (the fanout of
``planner.affinity``); 0 is what crosses."""
_TURNS = 2
"""Exchanges of each two nodes in a sweep."""
_PRICINGS = 2
"""Of all samples, while each two nodes exchange once."""
NEVER = 1 << 40
"""A loss that no exchange makes up for."""
_UNITS = 64
"""Units of a byte in prices: shares of bytes are integers too."""
_DEEPEST = 16
"""Samples of a node from which on one more costs nothing."""
_LOSS_BITS = 32
"""Of the losses of a sample, which ``NEVER`` exceeds."""


@dataclass(frozen=True)
class Dealt:
    """Where the samples of a batch are trained.

    Attributes:
        to: int64 [samples], nodes.
        bytes_before: of rows between nodes if each sample is trained where it was read.
        bytes_after: of rows between nodes as dealt.
    """

    to: Int64Array
    bytes_before: int
    bytes_after: int


def deal_batch(batch: BatchRows, nodes: int) -> Dealt:
    """Return the node of each sample. Every pair of node and group keeps its number of samples.

    Args:
        nodes: number of nodes; ``batch`` has no other.
    """
    prices, places = BatchPrices(batch, nodes), _Places(batch, nodes)
    before = prices.bytes_of(places.to)
    best = Dealt(places.to.copy(), before, before)
    rounds = max(1, nodes - 1 + nodes % 2)
    stride = -(-rounds // _PRICINGS)
    turn = 0
    for share, sweeps in _SHARES:
        for _ in range(sweeps):
            for at in range(_TURNS * rounds):
                if at % stride == 0:
                    losses = prices.losses(places.to, share)
                places.exchange(_partners(nodes, turn), losses)
                turn += 1
            if share == 0.0:
                after = prices.bytes_of(places.to)
                if after < best.bytes_after:
                    best = Dealt(places.to.copy(), before, after)
    return best


class _Places:
    """Where samples are: each node and group has equally many places, and some of these are empty.

    Attributes:
        to: int64 [samples], the node of each.
    """

    def __init__(self, batch: BatchRows, nodes: int) -> None:
        samples, groups = len(batch.node), int(batch.group.max(initial=0)) + 1
        bucket = batch.node * groups + batch.group
        counts = np.bincount(bucket, minlength=nodes * groups)
        self._size = int(counts.max())
        self._bits = self._size.bit_length()
        order = np.argsort(bucket, kind="stable")
        position = np.arange(samples) - np.repeat(np.cumsum(counts) - counts, counts)
        filled = np.full((nodes * groups, self._size), samples)
        filled[bucket[order], position] = order
        self._sample = filled.reshape(nodes, groups, self._size)
        """int64 [nodes, groups, size]: the number of samples where there is none."""
        self.to = batch.node.copy()

    def exchange(self, partners: Int64Array, losses: Int64Array) -> None:
        """Exchange the half of the pairs that win most: losses hold for one exchange at a time.

        Args:
            partners: int64 [nodes], of each node; itself if it has none.
            losses: int64 [nodes, samples + 1], of moving each sample (``BatchPrices.losses``); changed, so that samples
                that were exchanged stay where they are.
        """
        low = np.flatnonzero(np.arange(len(partners)) < partners)
        high = partners[low]
        both = self._ordered(np.concatenate([low, high]), np.concatenate([high, low]), losses)
        first, second = both[: len(low)].reshape(-1), both[len(low) :].reshape(-1)
        loss = (first >> self._bits) + (second >> self._bits)
        wins = np.flatnonzero(loss < 0)
        bits = len(wins).bit_length()
        most = np.sort(loss[wins] << bits | np.arange(len(wins)))[: (len(wins) + 1) // 2]
        pair = wins[most & ((1 << bits) - 1)]
        group_size = self._sample.shape[1] * self._size
        mask = (1 << self._bits) - 1
        node = pair // max(1, group_size)
        begins = pair % max(1, group_size) // max(1, self._size) * self._size
        here = low[node] * group_size + begins + (first[pair] & mask)
        there = high[node] * group_size + begins + (second[pair] & mask)
        flat = self._sample.reshape(-1)
        left, right = flat[here], flat[there]
        flat[here], flat[there] = right, left
        self.to[left], self.to[right] = high[node], low[node]
        losses[:, left] = losses[:, right] = NEVER

    def _ordered(self, nodes: Int64Array, others: Int64Array, losses: Int64Array) -> Int64Array:
        """Return int64 [nodes, groups, size], ascending: the loss of moving a sample to the other node, and in the
        last bits its place."""
        codes = self._sample[nodes] + (others * losses.shape[1])[:, None, None]
        keys: Int64Array = losses.reshape(-1)[codes]
        keys <<= self._bits
        keys |= np.arange(self._size)
        keys.sort(axis=-1)
        return keys


def _partners(nodes: int, turn: int) -> Int64Array:
    """Return int64 [nodes]: the node that each is paired with in a turn of a round robin; itself if it has none."""
    players = nodes + nodes % 2
    last, turn = players - 1, turn % max(1, players - 1)
    partner = (2 * turn - np.arange(players)) % max(1, last)
    partner[turn], partner[last] = last, turn
    partner = partner[:nodes]
    return np.where(partner < nodes, partner, np.arange(nodes))


@dataclass(frozen=True)
class BatchRows:
    """A global batch, as all ranks know it.

    Attributes:
        offsets: int64 [samples + 1], where the rows of each sample begin in ``rows``.
        rows: int64 [n], numbers of rows from 0; one that a sample has twice is priced less exactly.
        row_bytes: int64 [n], bytes between nodes of a step that needs the row in a node that is not its home.
        homes: int64 [n], the node of the row's home.
        node: int64 [samples], the node that has read the sample.
        group: int64 [samples], from 0; samples of equal group may take each other's place.
    """

    offsets: Int64Array
    rows: Int64Array
    row_bytes: Int64Array
    homes: Int64Array
    node: Int64Array
    group: Int64Array


class BatchPrices:
    """Prices of a batch's samples by node: of rows that several samples use by what the others of a node use.

    Args:
        nodes: number of nodes; ``batch`` has no other.
    """

    def __init__(self, batch: BatchRows, nodes: int) -> None:
        _, first, row, uses = np.unique(batch.rows, return_index=True, return_inverse=True, return_counts=True)
        again = uses > 1
        shared, first = again[row], first[again]
        self._codes: Int64Array = ((np.cumsum(again) - 1) * nodes)[row[shared]]
        """int64 [entries], by sample: where the nodes of the entry's row begin in a flat [rows, nodes]."""
        self._offsets = np.concatenate([[0], np.cumsum(shared)])[batch.offsets]
        self._away_bytes = batch.row_bytes[first][:, None] * (np.arange(nodes) != batch.homes[first][:, None])
        """int64 [rows, nodes], of the row in a node that is not its home."""
        alone = np.flatnonzero(~shared)
        bucket = (np.searchsorted(batch.offsets, alone, side="right") - 1) * nodes + batch.homes[alone]
        # Sums of float64 are exact: bytes of a batch are below 2**53.
        at_home = np.bincount(bucket, batch.row_bytes[alone], len(batch.node) * nodes)
        self._alone_bytes = at_home.astype(np.int64).reshape(-1, nodes)
        """int64 [samples, nodes], of rows that no other sample uses, where they are at home."""
        most = int(self._sums(batch.row_bytes[shared]).max(initial=0))
        self._shift = max(0, most.bit_length() + _UNITS.bit_length() - _LOSS_BITS)

    def bytes_of(self, to: Int64Array) -> int:
        """Return bytes of rows between nodes."""
        alone = self._alone_bytes.sum() - self._alone_bytes[np.arange(len(to)), to].sum()
        return int(self._away_bytes[self._counts(self._at(to)) > 0].sum() + alone)

    def losses(self, to: Int64Array, share: float) -> Int64Array:
        """Return int64 [nodes, samples + 1]: what moving each sample there would cost; below 0: it would save that.
        The last is ``NEVER``.

        Args:
            share: of a row's bytes that one more sample of a node costs, its square the next one, and so on.
        """
        powers = np.floor(_UNITS * share ** np.arange(_DEEPEST)).astype(np.int64)
        at, away = self._at(to), self._away_bytes >> self._shift
        counts = np.minimum(self._counts(at), _DEEPEST - 1)
        # By row and node first: entries are several times as many. Where no sample is, none leaves.
        arrives, leaves = (powers[counts] * away).reshape(-1), (powers[counts - 1] * away).reshape(-1)
        fixed = -self._alone_bytes * _UNITS >> self._shift
        losses = np.full((fixed.shape[1], len(to) + 1), NEVER)
        losses[:, :-1] = fixed.T - (self._sums(leaves[at]) + fixed[np.arange(len(to)), to])
        for node, of_node in enumerate(losses):
            of_node[:-1] += self._sums(arrives[node:][self._codes])
        return losses

    def _at(self, to: Int64Array) -> Int64Array:
        """Return int64 [entries]: where the row and its sample's node are in a flat [rows, nodes]."""
        return np.repeat(to, np.diff(self._offsets)) + self._codes

    def _counts(self, at: Int64Array) -> Int64Array:
        """Return int64 [rows, nodes]: samples of each node that use a row."""
        return np.bincount(at, minlength=self._away_bytes.size).reshape(self._away_bytes.shape)

    def _sums(self, of_entry: Int64Array) -> Int64Array:
        """Return int64 [samples] sums over each sample's entries; what wraps round in between does no harm."""
        until = np.zeros(len(of_entry) + 1, dtype=np.int64)
        np.cumsum(of_entry, out=until[1:])
        sums: Int64Array = np.diff(until[self._offsets])
        return sums
