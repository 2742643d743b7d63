"""A table larger than memory: every way learns the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.bench.programs.memory import Flexd, Tensors, batches

SETTING = {"rows": 3_000, "dim": 8, "ids": 500, "fast_bytes": 40_000}


@pytest.mark.parametrize("ahead", [False, True])
def test_all_ways_train_the_same(tmp_path: Path, ahead: bool) -> None:
    mapped = Tensors(SETTING, tmp_path)
    (tmp_path / "rows").mkdir()
    held = Flexd(SETTING, tmp_path / "rows", ahead=ahead)
    drawn = batches(3_000, 500, 1.05, seed=3)
    given = [next(drawn) for _ in range(4)]
    for ids in given:
        held.step(ids)
    for ids in given[: 3 if ahead else 4]:  # the last one is still to come
        mapped.step(ids)
    figures = held.figures()
    assert 0 < figures["cache_slots"] < 3_000
    assert figures["missed"] > 0
    assert torch.allclose(held._collection.gather_table("item"), mapped._rows, rtol=1e-5)
    assert not torch.equal(mapped._rows, torch.ones(3_000, 8))
    held.close()
