"""Distinct rows of one step: of every rank, of every node and of the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout

Int64Array = npt.NDArray[np.int64]


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

    @property
    def accesses(self) -> int:
        return int(self.count.sum())


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
