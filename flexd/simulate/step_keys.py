"""Distinct rows of one step, of every rank, of every node and of the job, and what they say of several steps: presence
probabilities, and a profile that is counted exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexd.core.arrays import Float64Array, Int64Array
from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace
from flexd.core.placement import RankLayout
from flexd.sketch.profile import Profile, RowTouches, TableProfile


@dataclass(frozen=True)
class StepKeys:
    """The id sets of one step, worked out once for all strategies. All arrays are int64.

    A *pair* is a row that a rank looks up, a *node pair* a row that any rank of a node looks up.

    Attributes:
        rank, count: [pairs], which rank, and how often it looks the row up; pairs stand rank by rank.
        node: [node pairs], which node.
        pair_row, node_row: of pairs and node pairs, index into ``rows``.
        rows: [distinct rows], keys, ascending.
    """

    rank: Int64Array
    count: Int64Array
    node: Int64Array
    pair_row: Int64Array
    node_row: Int64Array
    rows: Int64Array

    @staticmethod
    def of(keys: Sequence[Int64Array], layout: RankLayout) -> StepKeys:
        """``keys``: by rank, int64 [n] keys looked up, in any order, repeats as often as they are looked up."""
        ranks = [np.unique(mine, return_counts=True) for mine in keys]
        nodes = [
            np.unique(np.concatenate([ranks[rank][0] for rank in layout.node_ranks(node)]))
            for node in range(layout.nodes)
        ]
        rows = np.unique(np.concatenate(nodes))
        return StepKeys(
            rank=np.repeat(np.arange(len(ranks)), [len(unique) for unique, _ in ranks]),
            count=np.concatenate([count for _, count in ranks]).astype(np.int64, copy=False),
            node=np.repeat(np.arange(len(nodes)), [len(node) for node in nodes]),
            pair_row=np.concatenate([np.searchsorted(rows, unique) for unique, _ in ranks]),
            node_row=np.concatenate([np.searchsorted(rows, node) for node in nodes]),
            rows=rows,
        )


@dataclass(frozen=True)
class StepPasses:
    """The keys of one step, worked out once for all strategies.

    Attributes:
        each: of every micro-batch.
        whole: of all of them together.
    """

    each: tuple[StepKeys, ...]
    whole: StepKeys

    @staticmethod
    def of(passes: Sequence[Sequence[Int64Array]], layout: RankLayout) -> StepPasses:
        """``passes``: by micro-batch and rank, as ``StepKeys.of`` takes them."""
        each = tuple(StepKeys.of(keys, layout) for keys in passes)
        if len(each) == 1:
            return StepPasses(each, each[0])
        return StepPasses(each, StepKeys.of([np.concatenate(of_rank) for of_rank in zip(*passes, strict=True)], layout))


class TouchCounter:
    """Sums of the steps that it has seen."""

    def __init__(self, layout: RankLayout) -> None:
        self._layout = layout
        self._steps = 0
        self._accesses = np.zeros(layout.world_size, dtype=np.int64)
        self._busiest = self._rank_rows = self._node_rows = self._job_rows = 0

    def see(self, keys: StepKeys) -> None:
        accesses = np.bincount(keys.rank, weights=keys.count, minlength=self._layout.world_size).astype(np.int64)
        self._steps += 1
        self._accesses += accesses
        self._busiest += int(accesses.max())
        self._rank_rows += len(keys.rank)
        self._node_rows += len(keys.node)
        self._job_rows += len(keys.rows)

    def figures(self) -> dict[str, Any]:
        """Return means a step: of a rank, a node, and the job.

        ``node_over_rank`` and ``job_over_node`` are 1 where all ranks (nodes) need the same rows, and the number of
        local ranks (nodes) where no row is needed by two of them.
        """
        layout = self._layout
        steps, each = max(1, self._steps), max(1, self._steps) * layout.world_size
        accesses = float(self._accesses.sum()) / each
        rank, node = self._rank_rows / each, self._node_rows / (steps * layout.nodes)
        job = self._job_rows / steps
        return {
            "accesses_of_rank": accesses,
            "accesses_of_busiest_rank": self._busiest / steps,
            "rows_of_rank": rank,
            "rows_of_node": node,
            "rows_of_job": job,
            "node_over_rank": node / rank if rank else None,
            "job_over_node": job / node if node else None,
        }


def exact_profile(
    passes: Sequence[Sequence[Int64Array]],
    keyspace: KeySpace,
    layout: RankLayout | None = None,
    micro_batches: int = 1,
) -> Profile:
    """Return a profile that lists every row that was looked up, with its exact share.

    Args:
        passes: by forward pass and rank, int64 [n] keys.
        layout: of the ranks. With it the profile has the touches of every row in a pass, counted in these.
        micro_batches: passes of a step.

    Raises:
        PlanError: no passes, or no access in them.
    """
    keys = [mine for ranks in passes for mine in ranks]
    total = sum(len(mine) for mine in keys)
    if not total:
        raise PlanError("no accesses to count", remedy="replay more steps, or larger batches")
    rows, counts = np.unique(np.concatenate(keys), return_counts=True)
    table_of = keyspace.table_of(rows)
    touches = None if layout is None else _touches(passes, rows, layout)
    made = []
    for index, table in enumerate(keyspace.tables):
        mine = np.flatnonzero(table_of == index)
        mine = mine[np.argsort(-counts[mine], kind="stable")]
        weight = float(counts[mine].sum())
        share = counts[mine] / weight if weight else np.empty(0)
        made.append(
            TableProfile(
                table=table.name,
                rows=table.rows,
                weight=weight,
                accesses_per_step=weight * micro_batches / len(passes),
                hot_rows=rows[mine] - keyspace.first_key[index],
                hot_share=share,
                bin_share=np.empty(0),
                bin_rows=np.empty(0),
                distinct_rows=float(len(mine)),
                touches=None
                if layout is None or touches is None
                else RowTouches(layout.nodes, layout.local_ranks, *touches[:, mine]),
            )
        )
    return Profile(tuple(made), samples=total)


def _touches(passes: Sequence[Sequence[Int64Array]], rows: Int64Array, layout: RankLayout) -> Float64Array:
    """Return float64[3, rows]: means a pass over the ranks, over the nodes, and of the job."""
    counts = np.zeros((3, len(rows)))
    for ranks in passes:
        keys = StepKeys.of(ranks, layout)
        at = np.searchsorted(rows, keys.rows)
        counts[0, at] += np.bincount(keys.pair_row, minlength=len(at))
        counts[1, at] += np.bincount(keys.node_row, minlength=len(at))
        counts[2, at] += 1
    touches: Float64Array = counts / (len(passes) * np.array([[layout.world_size], [layout.nodes], [1]]))
    return touches
