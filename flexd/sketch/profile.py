"""The planner's input: per table the access rate, the frequency curve, the hot rows with error bounds, and the source
nodes of their accesses, estimated from a sample."""

import math
from dataclasses import dataclass

import numpy as np

from flexd.core.arrays import Float32Array, Float64Array, Int32Array, Int64Array, matches
from flexd.core.placement import RankLayout

_LEAST_AFFINITY = 1e-4


@dataclass(frozen=True)
class TableSources:
    """Sampled accesses of one table and of its listed rows, by node.

    The counts are sparse: the sample is bounded and most listed rows of a large table are not in it, so the memory does
    not grow with listed rows x nodes.

    Attributes:
        node_share: float64[nodes], share of each node in the sampled accesses (the table's node mix); zeros if there
            are none.
        hot_position: int64[e], index into ``hot_rows``, ascending.
        hot_node: int32[e], node of each entry.
        hot_accesses: float32[e], sampled accesses of that row from that node.
        prior_accesses: weight of the table's mix against a row's own sampled accesses.
        affinity: probability that two accesses of the same row come from the same node (the row being that of a random
            access), above what the node mix alone gives, on a scale of 0 (rows come from any node) to 1 (every row
            belongs to one node). Unbiased: where it is near 0, or few rows were sampled twice, the estimate can be
            below 0. 0 with one node, NaN if no row was sampled twice.
    """

    node_share: Float64Array
    hot_position: Int64Array
    hot_node: Int32Array
    hot_accesses: Float32Array
    prior_accesses: float
    affinity: float

    @property
    def nodes(self) -> int:
        return len(self.node_share)

    def share(self, positions: Int64Array) -> Float32Array:
        """Return the share of each node in the accesses of listed rows: int64[n] positions -> float32[n, nodes].

        Posterior mean of a Dirichlet prior with the table's own mix as its mean and ``prior_accesses`` as its weight
        (Gelman et al., *Bayesian Data Analysis*, 3rd ed., section 3.4): (counts + prior * mix) / (accesses + prior). A
        row without sampled accesses gets the mix. The prior weight follows from the affinity: two draws from one
        Dirichlet-multinomial agree beyond the mix with probability 1 / (prior + 1).
        """
        wanted, where = np.unique(positions, return_inverse=True)
        counts = np.zeros((len(wanted), self.nodes), dtype=np.float32)
        found, at = matches(wanted, self.hot_position)
        # Assignment is enough, because (row, node) pairs do not repeat.
        counts[at, self.hot_node[found]] = self.hot_accesses[found]
        counts = counts[where.reshape(-1)]
        prior = self.prior_accesses * self.node_share
        share: Float64Array = (counts + prior) / (counts.sum(axis=1, keepdims=True) + self.prior_accesses)
        return share.astype(np.float32)


def read_sources(rows: Int64Array, ranks: Int32Array, hot_rows: Int64Array, layout: RankLayout) -> TableSources:
    """Return the source nodes of a sample under the present layout. The sample keeps ranks, so layouts may change.

    Args:
        rows, ranks: int64[n] row and int32[n] source rank of each sampled access.
        hot_rows: int64[h] listed rows in any order, without repeats.
    """
    nodes = layout.nodes
    known = (ranks >= 0) & (ranks < layout.world_size)
    rows, node = rows[known], (ranks[known] // layout.local_ranks).astype(np.int32)
    mix = np.bincount(node, minlength=nodes).astype(np.float64)
    seen, row_of = np.unique(rows, return_inverse=True)
    pairs, pair_of = np.unique(row_of.reshape(-1) * nodes + node, return_inverse=True)
    pair_row, pair_node = pairs // nodes, (pairs % nodes).astype(np.int32)
    accesses = np.bincount(pair_of.reshape(-1), minlength=len(pairs)).astype(np.float64)

    # The sample is shorter: searching the listed rows in it avoids sorting a million rows.
    found, at = matches(seen, hot_rows)
    position = np.full(len(seen), -1, dtype=np.int64)
    position[at] = found
    position = position[pair_row]
    listed = np.flatnonzero(position >= 0)
    listed = listed[np.argsort(position[listed], kind="stable")]
    affinity = _affinity(accesses, pair_row, pair_node, nodes)
    prior = 1 / max(affinity, _LEAST_AFFINITY) - 1 if math.isfinite(affinity) else 1 / _LEAST_AFFINITY - 1
    return TableSources(
        node_share=mix / max(1.0, mix.sum()),
        hot_position=position[listed],
        hot_node=pair_node[listed],
        hot_accesses=accesses[listed].astype(np.float32),
        prior_accesses=max(prior, 1e-2),
        affinity=affinity,
    )


def _affinity(accesses: Float64Array, pair_row: Int64Array, pair_node: Int32Array, nodes: int) -> float:
    if nodes == 1:
        return 0.0
    if not len(accesses):
        return math.nan
    first_of_row = np.flatnonzero(np.diff(pair_row, prepend=-1))
    of_row = np.add.reduceat(accesses, first_of_row)
    same = np.add.reduceat(accesses * (accesses - 1), first_of_row)
    twice = of_row >= 2
    sampled_pairs = float(of_row[twice].sum())
    if not sampled_pairs:
        return math.nan
    # One of a row's n accesses, and another of them: same-node pairs / (n - 1), each access counting once.
    agreeing = float((same[twice] / (of_row[twice] - 1)).sum()) / sampled_pairs
    of_node = np.bincount(pair_node, accesses)
    total = float(of_node.sum())
    by_chance = float((of_node * (of_node - 1)).sum()) / (total * (total - 1))
    # At 1 all accesses come from one node: there is nothing to follow.
    return (agreeing - by_chance) / (1 - by_chance) if by_chance < 1 else 0.0


@dataclass(frozen=True)
class RowTouches:
    """Measured touches of a table's listed rows: means a forward pass, NaN where unknown.

    Attributes:
        nodes, local_ranks: the layout under which they were measured.
        per_rank: float64[h], share of the ranks that look the row up (u).
        per_node: float64[h], share of the nodes of which any rank does (v).
        anywhere: float64[h], share of the passes in which any rank does (w).
        accesses: mean look-ups of the table by a rank in the batches that were counted; None if they are those of
            the profile.
    """

    nodes: int
    local_ranks: int
    per_rank: Float64Array
    per_node: Float64Array
    anywhere: Float64Array
    accesses: float | None = None


@dataclass(frozen=True)
class TableProfile:
    """The accesses of one table as shares of the table's own accesses.

    Attributes:
        table: name.
        rows: rows of the table.
        weight: decayed accesses counted (the sum over rows); 0 means that the stream has not touched the table.
        accesses_per_step: expected accesses of the whole job (all ranks) to this table in one training step.
        hot_rows: int64[h], individually listed row ids, most frequent first.
        hot_share: float64[h], estimated share of the table's accesses (``estimate / weight``).
        bin_share: float64[k], share of one row in each frequency bin of the other rows.
        bin_rows: float64[k], rows in each bin (fractional where a sketch estimates the curve).
        distinct_rows: rows with at least one access (estimate).
        hot_bounds: (float64[h], float64[h]), bounds on ``hot_share``; None for exact counters.
        sources: source nodes of the accesses, or None if the layout was not known.
        touches: measured touches of the hot rows, or None if none were measured.
    """

    table: str
    rows: int
    weight: float
    accesses_per_step: float
    hot_rows: Int64Array
    hot_share: Float64Array
    bin_share: Float64Array
    bin_rows: Float64Array
    distinct_rows: float
    hot_bounds: tuple[Float64Array, Float64Array] | None = None
    sources: TableSources | None = None
    touches: RowTouches | None = None

    @property
    def hot_lower(self) -> Float64Array:
        """Lower bounds on ``hot_share``."""
        return self.hot_share if self.hot_bounds is None else self.hot_bounds[0]

    @property
    def hot_upper(self) -> Float64Array:
        """Upper bounds on ``hot_share``."""
        return self.hot_share if self.hot_bounds is None else self.hot_bounds[1]

    @property
    def coverage(self) -> float:
        """Share of ``weight`` that hot rows and bins together explain, 0-1."""
        # Rounded, because shares add up to 1 only nearly.
        return round(min(1.0, float(self.hot_share.sum() + self.bin_share @ self.bin_rows)), 9)


@dataclass(frozen=True)
class Profile:
    """All tables at one moment.

    Attributes:
        tables: one entry per table, in the order of the key space.
        generation: number of the profile, increasing across restarts of the daemon.
        event_time_seconds: newest event time (Unix seconds), NaN before the first access.
        half_life_seconds: of the decay; inf without decay.
        lag_messages: stream messages not yet read when the profile was made.
        samples: accesses counted, undecayed.
    """

    tables: tuple[TableProfile, ...]
    generation: int = 0
    event_time_seconds: float = float("nan")
    half_life_seconds: float = float("inf")
    lag_messages: int = 0
    samples: int = 0


def zipf_table(name: str, rows: int, exponent: float, listed: int, accesses_per_step: float, turn: int) -> TableProfile:
    """Return the profile of a table whose look-ups follow Zipf's law, in closed form.

    The share of the k-th most frequent row is proportional to k^-exponent. The first ``listed`` rows are listed one by
    one, the rest is in bins.

    The sum over a bin [m, n) is the integral of x^-s from m - 1/2 to n - 1/2 (midpoint rule, relative error at most
    s(s+1) / 24 m^2).
    Row ids are spread over the table by a stride that shares no factor with its rows; ``turn`` shifts them.
    """
    listed = min(listed, rows)
    frequency = np.arange(1, listed + 1, dtype=np.float64) ** -exponent
    edges = np.unique(np.geomspace(listed + 1, rows + 1, 256).astype(np.int64)) if listed < rows else np.empty(0)
    low, high = edges[:-1] - 0.5, edges[1:] - 0.5
    power = 1.0 - exponent
    summed = np.log(high / low) if abs(power) < 1e-9 else (high**power - low**power) / power
    number = high - low
    total = float(frequency.sum() + summed.sum())
    stride = max(int(rows * 0.6180339887), 1)
    while math.gcd(stride, rows) != 1:
        stride += 1
    share = frequency / total
    return TableProfile(
        table=name,
        rows=rows,
        weight=1e9,
        accesses_per_step=accesses_per_step,
        hot_rows=(np.arange(listed, dtype=np.int64) * stride + turn) % rows,
        hot_share=share,
        bin_share=summed / number / total if len(number) else np.empty(0),
        bin_rows=number if len(number) else np.empty(0),
        distinct_rows=float(rows),
    )
