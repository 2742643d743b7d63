"""Misses of the batches of bench_memory by policy, counted in the frame table: nothing here depends on the clock."""

from __future__ import annotations

import numpy as np
import torch
from bench_frames import Steps, missed_by_frames
from bench_memory_job import batches, popular_rows, popular_touches

from flexd.embedding.store.slow.half_life import HALF_LIVES

ROWS_DIVIDED, IDS_DIVIDED = 100, 10
"""Table and look-ups of a step are made smaller by these, so that some hundred steps fill the frames many times over:
before that every policy misses alike."""
SHARE = 0.05
"""Of the rows, in frames."""
AHEAD = 4


def misses(rows: int, ids: int, zipf: float, steps: int) -> dict[str, float]:
    """Return misses a distinct row with 5 % of the rows in frames, over the last three quarters of the steps.

    "moved": the popularity of the rows is another one from the first quarter of the steps on, where counting begins.
    Static: the rows that are the most popular in the beginning, for good; no choice that never moves misses less
    while the popularity stays. "known popularity": the batches ahead, and of other rows the true probability of a use
    in place of counts: what no counting can be better than.
    """
    rows, ids = rows // ROWS_DIVIDED, ids // IDS_DIVIDED
    figures: dict[str, float] = {}
    touches = torch.empty(rows, dtype=torch.float64)
    touches[popular_rows(rows, rows)] = popular_touches(rows, rows, ids, zipf)
    for prefix, moved in (("", 0), ("moved: ", rows // 3 or 1)):
        drawn = batches(rows, ids, zipf, seed=2)
        keys = [next(drawn).numpy() for _ in range(steps)]
        first = steps // 4
        keys = [*keys[:first], *((batch + moved) % rows for batch in keys[first:])]
        steps_of = Steps.of(np.concatenate(keys), ids)
        frames = max(int(np.diff(steps_of.starts).max()) + 1, int(rows * SHARE))
        popular = np.zeros(rows, dtype=np.bool_)
        popular[popular_rows(rows, frames).numpy()] = True
        static = np.concatenate([~popular[np.unique(batch)] for batch in keys[first:]])
        figures[f"{prefix}static"] = float(static.mean())
        figures[f"{prefix}LRU"] = missed_by_frames(steps_of, frames, 0.0, 0)[0]
        figures[f"{prefix}flexd"] = missed_by_frames(steps_of, frames, None, 0)[0]
        figures[f"{prefix}flexd, {AHEAD} ahead"] = missed_by_frames(steps_of, frames, None, AHEAD)[0]
        long = missed_by_frames(steps_of, frames, HALF_LIVES[-1], AHEAD)[0]
        figures[f"{prefix}half-life {HALF_LIVES[-1]:g}, {AHEAD} ahead"] = long
        known = touches.roll(moved)[torch.from_numpy(np.unique(np.concatenate(keys)))]
        figures[f"{prefix}known popularity, {AHEAD} ahead"] = missed_by_frames(
            steps_of, frames, 1.0, AHEAD, touches=known
        )[0]
        figures[f"{prefix}Belady"] = missed_by_frames(steps_of, frames, 1.0, len(steps_of) + 1)[0]
    return figures
