"""Batches of a dataset, dealt by the loader: each rank reads the samples whose rows are in its node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from flexd.core.arrays import Int64Array, first_of_run, places_of_runs
from flexd.core.errors import EmbeddingError
from flexd.embedding.collection import EmbeddingCollection

_ID_BYTES = 8

# Share of the bytes of a row that one more sample costs in a node where one uses it already, its square where two do,
# and so on, and sweeps with that share. Above 0 samples gather where others use their rows (the fanout of
# ``planner.affinity``); 0 is what crosses.
_SHARES = ((0.75, 1), (0.5, 1), (0.0, 2))
# Exchanges of each two nodes in a sweep.
_TURNS = 2
# Of all samples, while each two nodes exchange once.
_PRICINGS = 2
NEVER = 1 << 40
"""A loss that no exchange makes up for."""
# Units of a byte in prices: shares of bytes are integers too.
_UNITS = 64
# Samples of a node from which on one more costs nothing.
_DEEPEST = 16
# Of an int64 that holds the prices of two nodes; a sum of a sample's has one bit less.
_HALF_BITS = 32


def deal_batch(batch: BatchRows, nodes: int) -> Int64Array:
    """Return int64 [samples], the node that trains each. Every pair of node and group keeps its number of samples, and
    no more bytes of rows cross between nodes than where each sample is trained where it was read.

    Args:
        nodes: number of nodes; ``batch`` has no other.
    """
    prices, places = BatchPrices.of(batch, nodes), _Places(batch, nodes)
    best, fewest = places.to.copy(), prices.bytes_of(places.to)
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
            if share == 0.0 and prices.bytes_of(places.to) < fewest:
                best, fewest = places.to.copy(), prices.bytes_of(places.to)
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
        position = places_of_runs(0, counts)
        filled = np.full((nodes * groups, self._size), samples)
        filled[bucket[order], position] = order
        # int64 [nodes, groups, size]: the number of samples where there is none.
        self._sample = filled.reshape(nodes, groups, self._size)
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


@dataclass(frozen=True)
class BatchPrices:
    """Prices of a batch's samples by node.

    Attributes:
        alone_bytes: int64 [samples, nodes], of rows that no other sample uses, where they are at home.
        first_codes: int64 [entries], by sample: where the nodes of the row begin in a flat [rows, nodes], of rows that
            others use, too.
        offsets: int64 [samples + 1], where the entries of each sample begin.
        away_bytes: int64 [rows, nodes], of such a row in a node that is not its home.
        shift: bits by which prices are narrowed where samples have very many bytes: two of them share an int64.
    """

    alone_bytes: Int64Array
    first_codes: Int64Array
    offsets: Int64Array
    away_bytes: Int64Array
    shift: int

    @staticmethod
    def of(batch: BatchRows, nodes: int) -> BatchPrices:
        samples = len(batch.node)
        codes, first = _number_shared(batch.rows, nodes)
        shared, alone = np.flatnonzero(codes >= 0), np.flatnonzero(codes < 0)
        sample = np.searchsorted(batch.offsets, alone, side="right") - 1
        # Sums of float64 are exact: bytes of a batch are below 2**53.
        at_home = np.bincount(sample * nodes + batch.homes[alone], batch.row_bytes[alone], samples * nodes)
        away_bytes = batch.row_bytes[first][:, None] * (np.arange(nodes) != batch.homes[first][:, None])
        offsets = np.searchsorted(shared, batch.offsets)
        bits = int(_sums(batch.row_bytes[shared], offsets).max(initial=0)).bit_length()
        shift = max(0, bits + _UNITS.bit_length() - _HALF_BITS)
        return BatchPrices(at_home.astype(np.int64).reshape(-1, nodes), codes[shared], offsets, away_bytes, shift)

    def bytes_of(self, to: Int64Array) -> int:
        """Return bytes of rows between nodes."""
        alone = self.alone_bytes.sum() - self.alone_bytes[np.arange(len(to)), to].sum()
        return int(self.away_bytes[self._users(self._codes(to)) > 0].sum() + alone)

    def losses(self, to: Int64Array, share: float) -> Int64Array:
        """Return int64 [nodes, samples + 1], in ``_UNITS`` of a byte: what moving each sample there would cost; below
        0: it would save that. The last is ``NEVER``.

        Args:
            share: of a row's bytes that one more sample costs, the next one its square, and so on.
        """
        powers = np.floor(_UNITS * share ** np.arange(_DEEPEST)).astype(np.int64)
        (samples, nodes), away = self.alone_bytes.shape, self.away_bytes >> self.shift
        at, fixed = np.arange(samples), -self.alone_bytes * _UNITS >> self.shift
        codes = self._codes(to)
        users = np.minimum(self._users(codes), _DEEPEST - 1)
        # By row and node first: entries are several times as many. Where no sample is, none leaves.
        arrives = powers[users] * away
        leaves = powers[users - 1] * away
        losses = np.full((nodes, samples + 1), NEVER)
        losses[:, :-1] = fixed.T - (_sums(leaves.reshape(-1)[codes], self.offsets) + fixed[at, to])
        for first in range(0, nodes, 2):
            # Two nodes at a time: a look-up for each entry is most of the time.
            if first + 1 < nodes:
                arrives[:, first] += arrives[:, first + 1] << _HALF_BITS
            there = _sums(arrives.reshape(-1)[first:][self.first_codes], self.offsets)
            losses[first, :-1] += there & ((1 << _HALF_BITS) - 1)
            losses[first + 1 : first + 2, :-1] += there >> _HALF_BITS
        return losses

    def _codes(self, to: Int64Array) -> Int64Array:
        """Return int64 [entries]: where the row and its sample's node are in a flat [rows, nodes]."""
        return np.repeat(to, np.diff(self.offsets)) + self.first_codes

    def _users(self, codes: Int64Array) -> Int64Array:
        """Return int64 [rows, nodes]: samples of each node that use a row."""
        return np.bincount(codes, minlength=self.away_bytes.size).reshape(self.away_bytes.shape)


def _sums(of_entry: Int64Array, offsets: Int64Array) -> Int64Array:
    """Return int64 [samples] sums over each sample's entries; what wraps round in between does no harm."""
    until = np.zeros(len(of_entry) + 1, dtype=np.int64)
    np.cumsum(of_entry, out=until[1:])
    return np.diff(until[offsets])


def _number_shared(rows: Int64Array, nodes: int) -> tuple[Int64Array, Int64Array]:
    """Return int64 [n], multiples of ``nodes`` that number rows which occur again, below 0 for others, and int64
    [numbers], an entry of each."""
    n, bits = len(rows), len(rows).bit_length()
    if int(rows.max(initial=0)).bit_length() + bits < 63:
        # Several times faster than argsort.
        both = np.sort(rows << bits | np.arange(n))
        order, ordered = both & ((1 << bits) - 1), both >> bits
    else:
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
    starts = np.flatnonzero(first_of_run(ordered))
    uses = np.diff(starts, append=n)
    again = uses > 1
    numbers = np.empty(n, dtype=np.int64)
    numbers[order] = np.repeat(np.where(again, np.cumsum(again) - 1, -1) * nodes, uses)
    return numbers, order[starts[again]]


class NodeSampler(Sampler[list[int]]):
    """Yields the indices of this rank's batches, for ``DataLoader(batch_sampler=...)``.

    The global batches are those of ``DistributedSampler``: equal samples in an order that the seed decides. Which rank
    trains which of them follows from the rows that they use, in equal numbers per rank. Every rank computes that alone,
    from where rows live when it begins to iterate: every rank begins at the same point of the program.

    Args:
        features: ids of all samples of the dataset, as ``collection`` takes them; on the device of the tables.
        collection: whose rows these are, on every rank.
        batch_size: samples of a rank and batch.
        shuffle: draw samples in a random order, another one each epoch (``set_epoch``).
        seed: equal on all ranks.

    Raises:
        EmbeddingError: ids are out of range, features differ in their samples, or ``batch_size`` is not positive.
    """

    def __init__(
        self, features: Any, collection: EmbeddingCollection, batch_size: int, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        if batch_size < 1:
            raise EmbeddingError(f"batches of {batch_size} samples", remedy="give a positive batch_size")
        values = collection.read(features)
        by_name, found = values.features, collection.keys_of(values)
        order = found.order
        sizes = {name: by_name[name].lengths.shape[0] for name in order}
        if len(set(sizes.values())) > 1:
            raise EmbeddingError(f"samples by feature: {sizes}", remedy="give every feature one length per sample")
        if found.faulty is not None and bool(found.faulty):
            raise EmbeddingError("ids of the dataset are out of range", remedy="give ids below the rows of the tables")
        self.samples = next(iter(sizes.values()), 0)
        sample = torch.arange(self.samples, device=found.keys.device).repeat(len(order))
        if order:
            sample = sample.repeat_interleave(torch.cat([by_name[name].lengths for name in order]).to(torch.int64))
        self._engine = collection.engine
        groups, wire = collection.keyspace.groups, collection.engine.router.wire
        end = collection.engine.homes.groups[-1].end_key
        distinct = (sample * end + found.keys).unique().cpu().numpy()  # type: ignore[no-untyped-call]
        of_sample, addresses = np.divmod(distinct, end)
        self._keys = collection.engine.homes.keys(addresses)
        self._first_keys = np.array([group.first_key for group in groups])
        # int64 [dim-groups] bytes of a row and its gradient with their ids, as they travel.
        self._row_bytes = np.array(
            [2 * group.dim * of.itemsize + _ID_BYTES for group, of in zip(groups, wire, strict=True)]
        )
        self._offsets = np.concatenate([[0], np.cumsum(np.bincount(of_sample, minlength=self.samples))])
        self._layout, self._rank = collection.layout, collection.rank
        self._batch_size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw another order; equal on all ranks."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self.samples // (self._batch_size * self._layout.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        addresses = self._engine.homes.addresses(self._keys)
        return self._batches(self._engine.migrator.nodes_of(addresses))  # now, and not when the first batch is read

    def _batches(self, nodes: Int64Array) -> Iterator[list[int]]:
        layout, size = self._layout, self._batch_size * self._layout.world_size
        order = np.arange(self.samples)
        if self._shuffle:
            order = np.random.default_rng([self._seed, self._epoch]).permutation(self.samples)
        reader = np.arange(size) % layout.world_size
        node, group = reader // layout.local_ranks, reader % layout.local_ranks
        mine = group == layout.local_rank_of(self._rank)
        for number in range(len(self)):
            chosen = order[number * size : (number + 1) * size]
            to = deal_batch(self._rows(chosen, nodes, node, group), layout.nodes)
            yield chosen[mine & (to == layout.node_of(self._rank))].tolist()

    def _rows(self, chosen: Int64Array, nodes: Int64Array, node: Int64Array, group: Int64Array) -> BatchRows:
        counts = self._offsets[chosen + 1] - self._offsets[chosen]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        at = places_of_runs(self._offsets[chosen], counts)
        rows = self._keys[at]
        row_bytes = self._row_bytes[np.searchsorted(self._first_keys, rows, side="right") - 1]
        return BatchRows(offsets, rows, row_bytes, nodes[at], node, group)
