"""Deal the samples of a global batch to nodes such that few bytes cross between nodes.

Samples are vertices and rows hyperedges, each joined to a fixed vertex for the node of its home: a row crosses once for
every node that uses it and is not its home. Pairs of samples of two nodes are exchanged while that saves bytes, so
every rank keeps its batch size and no result is worse than dealing nothing.

Every rank computes the same result from the same arrays: all arithmetic is of integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.shared_rows import NEVER, BatchPrices, BatchRows

Int64Array = npt.NDArray[np.int64]

_SHARES = ((0.75, 1), (0.5, 1), (0.0, 2))
"""Share of the bytes of a row that one more sample costs in a node where one uses it already, its square where two do,
and so on, and sweeps with that share. Above 0 samples gather where others use their rows (the fanout of
``planner.affinity``); 0 is what crosses."""
_TURNS = 2
"""Exchanges of each two nodes in a sweep."""
_PRICINGS = 2
"""Of all samples, while each two nodes exchange once."""


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
    prices, places = BatchPrices.of(batch, nodes), _Places(batch, nodes)
    before = prices.bytes_of(places.to)
    best = Dealt(places.to.copy(), before, before)
    rounds = max(1, nodes - 1 + nodes % 2)
    stride = -(-rounds // _PRICINGS)
    turn = 0
    for share, sweeps in _SHARES:
        priced = prices.with_share(places.to, share)
        for _ in range(sweeps):
            for at in range(_TURNS * rounds):
                if at % stride == 0:
                    losses = priced.losses(places.to)
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
            losses: int64 [nodes, samples + 1], of moving each sample (``SharePrices.losses``); changed, so that samples
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
