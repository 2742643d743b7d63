"""Source nodes of the accesses of a table's rows, estimated from a sample."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

_JACKKNIFE_GROUPS = 20
_JACKKNIFE_CELLS = 1_000_000
_LEAST_AFFINITY = 1e-4
_LEAST_PRIOR_ACCESSES = 1e-2


@dataclass(frozen=True)
class TableSources:
    """Sampled accesses of one table and of its listed rows, by node.

    The counts are sparse: the sample is bounded and most listed rows of a large table are not in it, so the memory does
    not grow with listed rows x nodes.

    Attributes:
        node_share: float64[nodes], share of each node in the sampled accesses (the table's node mix); zeros if there
            are none.
        sampled_accesses: number of sampled accesses from ranks of the layout.
        hot_position: int64[e], index into ``hot_rows``, ascending.
        hot_node: int32[e], node of each entry.
        hot_accesses: float32[e], sampled accesses of that row from that node.
        prior_accesses: weight of the table's mix against a row's own sampled accesses.
        affinity: probability that two accesses of the same row come from the same node (the row being that of a random
            access), above what the node mix alone gives, on a scale of 0 (rows come from any node) to 1 (every row
            belongs to one node). Unbiased: where it is near 0, or few rows were sampled twice, the estimate can be
            below 0, by about ``affinity_error``. 0 with one node, NaN if no row was sampled twice.
        affinity_error: standard error of ``affinity`` (delete-a-group jackknife), NaN if unknown.
    """

    node_share: Float64Array
    sampled_accesses: int
    hot_position: Int64Array
    hot_node: Int32Array
    hot_accesses: Float32Array
    prior_accesses: float
    affinity: float
    affinity_error: float

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
        counts = self._counts(positions)
        prior = self.prior_accesses * self.node_share
        share: Float64Array = (counts + prior) / (counts.sum(axis=1, keepdims=True) + self.prior_accesses)
        return share.astype(np.float32)

    def _counts(self, positions: Int64Array) -> Float32Array:
        wanted, where = np.unique(positions, return_inverse=True)
        counts = np.zeros((len(wanted), self.nodes), dtype=np.float32)
        if len(wanted):
            at = np.minimum(np.searchsorted(wanted, self.hot_position), len(wanted) - 1)
            found = wanted[at] == self.hot_position
            # Assignment is enough, because (row, node) pairs do not repeat.
            counts[at[found], self.hot_node[found]] = self.hot_accesses[found]
        result: Float32Array = counts[where.reshape(-1)]
        return result


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

    position = _positions(seen, hot_rows)[pair_row]
    listed = np.flatnonzero(position >= 0)
    listed = listed[np.argsort(position[listed], kind="stable")]
    affinity, error = _affinity(pair_of.reshape(-1), accesses, pair_row, pair_node, nodes)
    prior = 1 / max(affinity, _LEAST_AFFINITY) - 1 if math.isfinite(affinity) else 1 / _LEAST_AFFINITY - 1
    return TableSources(
        node_share=mix / max(1.0, mix.sum()),
        sampled_accesses=len(rows),
        hot_position=position[listed],
        hot_node=pair_node[listed],
        hot_accesses=accesses[listed].astype(np.float32),
        prior_accesses=max(prior, _LEAST_PRIOR_ACCESSES),
        affinity=affinity,
        affinity_error=error,
    )


def _positions(seen: Int64Array, hot_rows: Int64Array) -> Int64Array:
    """Return the index in ``hot_rows`` of each of int64[s] ascending rows, -1 if it is not listed."""
    position = np.full(len(seen), -1, dtype=np.int64)
    if len(seen) and len(hot_rows):
        # The sample is shorter: searching the listed rows in it avoids sorting a million rows.
        at = np.minimum(np.searchsorted(seen, hot_rows), len(seen) - 1)
        found = np.flatnonzero(seen[at] == hot_rows)
        position[at[found]] = found
    return position


def _affinity(
    pair_of: Int64Array, accesses: Float64Array, pair_row: Int64Array, pair_node: Int32Array, nodes: int
) -> tuple[float, float]:
    """Return (affinity, standard error) of sampled accesses.

    Args:
        pair_of: int64[n], index of the (row, node) pair of each access.
        accesses: float64[p], accesses of each pair; pairs ascend by row.
        pair_row, pair_node: [p], row and node of each pair.
    """
    if nodes == 1:
        return 0.0, 0.0
    if not len(pair_of):
        return math.nan, math.nan
    whole = float(_affinities(accesses[None, :], pair_row, pair_node)[0])
    if not math.isfinite(whole) or len(pair_of) < 2 * _JACKKNIFE_GROUPS:
        return whole, math.nan
    # Delete-a-group jackknife (Wolter, Introduction to Variance Estimation, 2nd ed., section 4.2). Groups are random,
    # because in groups by time the accesses of one message would be left out together.
    group = np.random.Generator(np.random.PCG64(0)).integers(0, _JACKKNIFE_GROUPS, len(pair_of))
    without: list[Float64Array] = []
    at_once = max(1, _JACKKNIFE_CELLS // len(accesses))
    for first in range(0, _JACKKNIFE_GROUPS, at_once):
        groups = min(at_once, _JACKKNIFE_GROUPS - first)
        mine = (group >= first) & (group < first + groups)
        cells = (group[mine] - first) * len(accesses) + pair_of[mine]
        left_out = np.bincount(cells, minlength=groups * len(accesses)).reshape(groups, len(accesses))
        without.append(_affinities(accesses - left_out, pair_row, pair_node))
    spread = np.concatenate(without)
    variance = (_JACKKNIFE_GROUPS - 1) / _JACKKNIFE_GROUPS * float(((spread - spread.mean()) ** 2).sum())
    return whole, math.sqrt(variance)


def _affinities(accesses: Float64Array, pair_row: Int64Array, pair_node: Int32Array) -> Float64Array:
    """float64[g, p] accesses of each pair in each of g samples -> float64[g] affinity."""
    first_of_row = np.flatnonzero(np.diff(pair_row, prepend=-1))
    of_row = np.add.reduceat(accesses, first_of_row, axis=1)
    same = np.add.reduceat(accesses * (accesses - 1), first_of_row, axis=1)
    twice = of_row >= 2
    # One of a row's n accesses, and another of them: same-node pairs / (n - 1), each access counting once.
    agreeing = np.where(twice, same / np.where(twice, of_row - 1, 1), 0.0).sum(axis=1)
    sampled_pairs = np.where(twice, of_row, 0.0).sum(axis=1)
    by_node = np.argsort(pair_node, kind="stable")
    first_of_node = np.flatnonzero(np.diff(pair_node[by_node], prepend=-1))
    of_node = np.add.reduceat(accesses[:, by_node], first_of_node, axis=1)
    total = of_node.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_chance = (of_node * (of_node - 1)).sum(axis=1) / (total * (total - 1))
        affinity: Float64Array = (agreeing / sampled_pairs - by_chance) / (1 - by_chance)
    # All accesses come from one node: there is nothing to follow.
    affinity[(by_chance >= 1) & (sampled_pairs > 0)] = 0.0
    return affinity
