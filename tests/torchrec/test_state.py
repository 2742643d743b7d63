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
from tests.support.torchrec_models import batch, make, plain_tables  # noqa: E402

STEPS = 4


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "sgd"])
def test_a_job_that_moves_to_flexd_and_back_has_the_losses_of_one_that_never_moved(
    pair: RankPool, optimizer: str, tmp_path: Path
) -> None:
    results = pair.run("torchrec_models:there_and_back", RankLayout(2, 1), optimizer, STEPS, str(tmp_path))
    for result in results:
        assert result["losses"] == pytest.approx(result["expected"], abs=2e-6)
        assert result["replicas_equal"]


def test_checkpoints_that_do_not_fit_are_refused_by_name_and_any_sharding_is_read(
    pair: RankPool, tmp_path: Path
) -> None:
    results = pair.run("torchrec_models:differing_checkpoints", RankLayout(2, 1), str(tmp_path / "a"))
    weight = "items.embeddings.item.weight"
    for rank, result in enumerate(results):
        errors = result["errors"]
        assert "Size mismatch" in errors["columns"], "an accumulator a row for each block of columns has no counterpart"
        assert "shop.momentum1" in errors["columns"]
        missing = f"rank 1: {weight} is missing" if rank else "rank 1 refused the checkpoint"
        assert errors["missing"].startswith(f"CheckpointError: {missing}")
        assert f"{weight} is (29, 4) torch.float32, not (61, 8)" in errors["shape"]
        assert f"{weight} is a Tensor, not a DTensor" in errors["plain"]
        assert "sparse.embedding_bag_collection.embedding_bags.user.weight momentum1 is missing" in errors["no state"]
        assert "the state of adam without the number of steps" in errors["adam"]
        assert result["unchanged"]
        assert result["steps"] == 7
        assert result["keys"] == ["tag.exp_avg_sq", "tag.momentum1"]
        assert result["shapes"] == {"item.momentum1": (61, 8), "item.exp_avg_sq": (61, 8)}
    model = make("rowwise_adagrad", weighted=False)
    tables = replace(model, seed=5)
    tables.load_rows("item", 0, torch.zeros(61, 8))
    dcp.load({"model": ModelState(model, tables)}, checkpoint_id=tmp_path / "a", no_dist=True)
    for name, table in results[0]["tables"].items():
        assert torch.equal(tables.gather_table(name), table), "the same on one rank as on two"
        assert not torch.equal(table, plain_tables(make(weighted=False))[name])


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
