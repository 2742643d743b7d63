"""A table larger than memory: every way learns the same, and the checks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench_memory import checks_of
from bench_memory_job import Flexd, Tensors, batches, compute

SETTING = {"rows": 3_000, "dim": 8, "fast_bytes": 40_000, "dense_seconds": 0.0}


@pytest.mark.parametrize("ahead", [False, True])
def test_all_ways_train_the_same(tmp_path: Path, ahead: bool) -> None:
    mapped = Tensors(SETTING, tmp_path)
    (tmp_path / "rows").mkdir()
    held = Flexd(SETTING, tmp_path / "rows", half_life=20.0, ahead=ahead)
    drawn = batches(3_000, 500, 1.05, seed=3)
    given = [next(drawn) for _ in range(4)]
    for ids in given:
        held.step(ids, compute(0.0))
    for ids in given[: 3 if ahead else 4]:  # the last one is still to come
        mapped.step(ids, compute(0.0))
    figures = held.figures()
    assert 0 < figures["frames"] < 3_000
    assert figures["missed"] > 0
    assert torch.allclose(held._collection.gather_table("item"), mapped._rows, rtol=1e-5)
    assert not torch.equal(mapped._rows, torch.ones(3_000, 8))
    held.close()


def test_checks() -> None:
    def way(seconds: float, missed: float = 1.0) -> dict[str, float]:
        return {"step_seconds": seconds, "missed": missed, "used": 10.0}

    answers = {"memory map": way(19.0), "RocksDB": way(3.0), "flexd": way(1.0), "flexd, LRU": way(1.0, 2.0)}
    assert {entry["name"]: entry["ok"] for entry in checks_of(answers, dense=False)} == {
        "memory map / flexd": False, "RocksDB / flexd": True, "misses / LRU's": True
    }  # fmt: skip
    answers = {"all fast": way(1.0), "flexd, run-ahead": way(1.2), "flexd": {"error": 1.0}}
    (only,) = checks_of(answers, dense=True)
    assert not only["ok"]
