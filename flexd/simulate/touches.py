"""Mean touches of the batches of a run: rows needed by a rank, by a node, by anyone."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexd.core.layout import RankLayout
from flexd.simulate.step_keys import StepKeys


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


def touches_in_words(touches: dict[str, Any], nodes: int, local_ranks: int) -> str:
    """Return the figures in a sentence."""
    text = (
        f"a rank looks up {touches['accesses_of_rank']:,.0f} rows "
        f"(the busiest {touches['accesses_of_busiest_rank']:,.0f}), {touches['rows_of_rank']:,.0f} of them distinct (u)"
    )
    ratios = []
    if local_ranks > 1:
        text += f", its node {touches['rows_of_node']:,.0f} (v)"
        ratios.append(f"v/u {touches['node_over_rank']:.2f} of {local_ranks}")
    if nodes > 1:
        text += f", the job {touches['rows_of_job']:,.0f} (w)"
        ratios.append(f"w/v {touches['job_over_node']:.2f} of {nodes}")
    return ": ".join([text, ", ".join(ratios)] if ratios else [text])
