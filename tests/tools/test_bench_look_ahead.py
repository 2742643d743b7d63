"""Training at every depth, as the benchmark does it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bench_look_ahead import train


@pytest.mark.slow
def test_depths_train_equally_and_known_batches_save_reads() -> None:
    """Rows come back in turns of six batches, so that counts say nothing and known batches everything."""
    rng = np.random.default_rng(3)
    turns = [rng.permutation(600)[:200] for _ in range(6)]
    batches = [torch.from_numpy(turns[step % 6][rng.integers(0, 200, 300)]) for step in range(60)]
    done = {depth: train(batches, 600, 400, depth) for depth in (0, 1, 4)}
    assert all(torch.equal(one["table"], done[0]["table"]) for one in done.values())
    read = {depth: one["figures"]["read"] for depth, one in done.items()}
    assert read[4] < 0.9 * read[1]
