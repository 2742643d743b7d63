"""Prices, for every sample of a global batch and every node, training it there: by the rows that samples share.

A row crosses once for each node that has a sample of it and is not its home, so what a sample adds depends on the
other samples of its node. Rows of one sample are a constant of the sample, and rows that many samples of every node
use cost nothing whoever moves: both stay out of the sums. All arithmetic is of integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

NEVER = 1 << 40
"""A loss that no exchange makes up for."""
_UNITS = 64
"""Units of a byte in prices: shares of bytes are integers too."""
_DEEPEST = 16
"""Samples of a node from which on one more costs nothing."""
_MARGIN = 3
"""Samples of a node beyond those that have a price: as they move, a row may get one."""
_NEARLY_ALL = 0.8
"""Share of the entries from which on leaving the others out does not pay."""
_HALF_BITS = 32
"""Of an int64 that holds the prices of two nodes; a sum of a sample's has one bit less."""


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
class SharedRows:
    """Rows that several samples of a batch use.

    Attributes:
        first_codes: int64 [entries], by sample: where the nodes of the entry's row begin in a flat [rows, nodes].
        offsets: int64 [samples + 1], where the entries of each sample begin.
        away_bytes: int64 [rows, nodes], of the row in a node that is not its home.
    """

    first_codes: Int64Array
    offsets: Int64Array
    away_bytes: Int64Array

    def codes(self, to: Int64Array) -> Int64Array:
        """Return int64 [entries]: where the row and its sample's node are in a flat [rows, nodes]."""
        codes = np.repeat(to, np.diff(self.offsets))
        codes += self.first_codes
        return codes

    def counts(self, codes: Int64Array) -> Int64Array:
        """Return int64 [rows, nodes]: samples of each node that use a row."""
        return np.bincount(codes, minlength=self.away_bytes.size).reshape(self.away_bytes.shape)

    def crossing_bytes(self, to: Int64Array) -> int:
        return int(self.away_bytes[self.counts(self.codes(to)) > 0].sum())

    def sums(self, of_entry: Int64Array) -> Int64Array:
        """Return int64 [samples] sums over each sample's entries; what wraps round in between does no harm."""
        until = np.zeros(len(of_entry) + 1, dtype=np.int64)
        np.cumsum(of_entry, out=until[1:])
        return np.diff(until[self.offsets])

    def below(self, to: Int64Array, depth: int) -> SharedRows:
        """Return the rows that fewer samples than ``depth`` use in a node that is not their home; all where these are
        nearly all."""
        counts = self.counts(self.codes(to))
        few = ((counts < depth) & (self.away_bytes > 0)).any(axis=1)
        if counts[few].sum() > _NEARLY_ALL * len(self.first_codes):
            return self
        # By code rather than by row: no division.
        numbers = np.zeros(counts.shape, dtype=np.int64)
        numbers[few, 0] = np.arange(np.count_nonzero(few)) * counts.shape[1]
        numbers[~few, 0] = -1
        first_codes = numbers.reshape(-1)[self.first_codes]
        kept = np.flatnonzero(first_codes >= 0)
        return SharedRows(first_codes[kept], np.searchsorted(kept, self.offsets), self.away_bytes[few])


@dataclass(frozen=True)
class BatchPrices:
    """Prices of a batch's samples by node.

    Attributes:
        alone_bytes: int64 [samples, nodes], of rows that no other sample uses, where they are at home.
        shared: rows that others use, too.
        bits: of the most bytes that the shared rows of a sample have.
    """

    alone_bytes: Int64Array
    shared: SharedRows
    bits: int

    @staticmethod
    def of(batch: BatchRows, nodes: int) -> BatchPrices:
        samples = len(batch.node)
        codes, first = _number_shared(batch.rows, nodes)
        shared, alone = np.flatnonzero(codes >= 0), np.flatnonzero(codes < 0)
        sample = np.searchsorted(batch.offsets, alone, side="right") - 1
        # Sums of float64 are exact: bytes of a batch are below 2**53.
        at_home = np.bincount(sample * nodes + batch.homes[alone], batch.row_bytes[alone], samples * nodes)
        away_bytes = batch.row_bytes[first][:, None] * (np.arange(nodes) != batch.homes[first][:, None])
        rows = SharedRows(codes[shared], np.searchsorted(shared, batch.offsets), away_bytes)
        bits = int(rows.sums(batch.row_bytes[shared]).max(initial=0)).bit_length()
        return BatchPrices(at_home.astype(np.int64).reshape(-1, nodes), rows, bits)

    def bytes_of(self, to: Int64Array) -> int:
        """Return bytes of rows between nodes."""
        at = np.arange(len(to))
        alone = self.alone_bytes.sum() - self.alone_bytes[at, to].sum()
        return self.shared.crossing_bytes(to) + int(alone)

    def with_share(self, to: Int64Array, share: float) -> SharePrices:
        """Return prices where one more sample costs a share of a row's bytes, the next one its square, and so on."""
        powers = np.floor(_UNITS * share ** np.arange(_DEEPEST)).astype(np.int64)
        shared = self.shared.below(to, int(np.count_nonzero(powers)) + _MARGIN)
        shift = max(0, self.bits + _UNITS.bit_length() - _HALF_BITS)
        fixed = -self.alone_bytes * _UNITS >> shift
        return SharePrices(shared, shared.away_bytes >> shift, powers, fixed)


@dataclass(frozen=True)
class SharePrices:
    """Prices where one more sample of a node costs a share of a row's bytes.

    Attributes:
        shared: rows with a price.
        away: int64 [rows, nodes], their bytes; fewer bits where samples have very many rows.
        powers: int64 [_DEEPEST], of a byte: what the first sample of a row costs in a node, the second, and so on.
        fixed: int64 [samples, nodes], what does not depend on other samples.
    """

    shared: SharedRows
    away: Int64Array
    powers: Int64Array
    fixed: Int64Array

    def losses(self, to: Int64Array) -> Int64Array:
        """Return int64 [nodes, samples + 1]: what moving each sample there would cost; below 0: it would save that.
        The last is ``NEVER``."""
        samples, nodes = self.fixed.shape
        at, shared = np.arange(samples), self.shared
        codes = shared.codes(to)
        counts = np.minimum(shared.counts(codes), _DEEPEST - 1)
        # By row and node first: entries are several times as many. Where no sample is, none leaves.
        arrives = self.powers[counts] * self.away
        leaves = self.powers[counts - 1] * self.away
        losses = np.full((nodes, samples + 1), NEVER)
        losses[:, :-1] = self.fixed.T - (shared.sums(leaves.reshape(-1)[codes]) + self.fixed[at, to])
        for first in range(0, nodes, 2):
            # Two nodes at a time: a look-up for each entry is most of the time.
            if first + 1 < nodes:
                arrives[:, first] += arrives[:, first + 1] << _HALF_BITS
            there = shared.sums(arrives.reshape(-1)[first:][shared.first_codes])
            losses[first, :-1] += there & ((1 << _HALF_BITS) - 1)
            losses[first + 1 : first + 2, :-1] += there >> _HALF_BITS
        return losses


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
    starts = np.flatnonzero(np.concatenate([np.ones(min(n, 1), dtype=np.bool_), ordered[1:] != ordered[:-1]]))
    uses = np.diff(starts, append=n)
    again = uses > 1
    numbers = np.empty(n, dtype=np.int64)
    numbers[order] = np.repeat(np.where(again, np.cumsum(again) - 1, -1) * nodes, uses)
    return numbers, order[starts[again]]
