"""Checkpoints of ``DistributedModelParallel``: to flexd and back, with equal losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.rank_pool import RankPool

torchrec = pytest.importorskip("torchrec")
from flexd.core.layout import RankLayout  # noqa: E402
from flexd.embedding.checkpoint.checkpoint import whole_state_dict  # noqa: E402
from flexd.torchrec import FusedOptimizerState, ModelState, replace  # noqa: E402
from tests.support import torchrec_models  # noqa: E402
from tests.support.torchrec_models import batch, make  # noqa: E402

STEPS = 4


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "sgd"])
def test_a_job_that_moves_to_flexd_and_back_has_the_losses_of_one_that_never_moved(
    pair: RankPool, optimizer: str, tmp_path: Path
) -> None:
    results = pair.run(torchrec_models.there_and_back, RankLayout(2, 1), optimizer, STEPS, str(tmp_path))
    for result in results:
        assert result["losses"] == pytest.approx(result["expected"], abs=2e-6)
        assert result["replicas_equal"]


def test_state_of_one_rank_is_written_and_read(tmp_path: Path) -> None:
    jobs = []
    for seed in (1, 2):
        model = make("rowwise_adagrad", weighted=False)
        jobs.append((model, replace(model, one_lookup=False)))
        for step in range(seed):
            model(*batch(step, seed, weighted=False)).backward()
            jobs[-1][1].optimizer.step()
    (saved, first), (loaded, second) = jobs
    state = {"model": ModelState(saved, first), "optimizer": FusedOptimizerState(first)}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    state = {"model": ModelState(loaded, second), "optimizer": FusedOptimizerState(second)}
    dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    for name, value in whole_state_dict(first).items():
        if "step" not in name:
            assert torch.equal(value, whole_state_dict(second)[name]), name
    assert torch.equal(saved.over.weight, loaded.over.weight)
