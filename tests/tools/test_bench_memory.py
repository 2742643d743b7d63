"""A table larger than memory: every way learns the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.bench.programs.memory import Flexd, Tensors, batches, popular_rows
from tools.bench.sections.frames import misses

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
    assert 0 < figures["frames"] < 3_000
    assert figures["missed"] > 0
    assert torch.allclose(held._collection.gather_table("item"), mapped._rows, rtol=1e-5)
    assert not torch.equal(mapped._rows, torch.ones(3_000, 8))
    held.close()


def test_misses_are_those_of_ordered_policies() -> None:
    figures = misses(1_000_000, 2_000, 1.05, 60)
    order = [figures[policy] for policy in ("Belady", "flexd, 4 ahead", "flexd", "LRU")]
    assert order == sorted(order)
    assert 0 < order[0] < order[-1]


def test_frames_begin_with_the_popular_rows(tmp_path: Path) -> None:
    held = Flexd(SETTING, tmp_path)
    held.begin(zipf=1.05)
    frames = int(held.figures()["frames"])
    held.step(popular_rows(3_000, frames))
    assert held.figures()["missed"] == 0
    held.step(torch.arange(frames // 4))
    missed = held.figures()["missed"]
    kept = popular_rows(3_000, frames)[: frames // 4]
    held.step(kept)
    assert held.figures()["missed"] - missed < len(kept) / 4, "the most popular leave last"
    held.close()
