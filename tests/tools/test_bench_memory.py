"""A table larger than memory: every way learns the same, and the checks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.bench.cases.memory import checks_of
from tools.bench.programs.memory import Flexd, Tensors, batches, popular_rows
from tools.bench.sections.frames import checks_of_misses, misses

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


def test_checks() -> None:
    def way(seconds: float, **more: float) -> dict[str, dict[str, float]]:
        return {"1.05": {"step_seconds": seconds, **more}}

    answers = {"memory map": way(19.0), "flexd": way(1.0)}
    answers |= {"all fast": way(0.1, device_step_seconds=1.0)}
    answers |= {"flexd, run-ahead": way(0.5, device_step_seconds=1.05)}
    counted = {"LRU": 0.3, "flexd": 0.31, "flexd, 4 ahead": 0.24, "Belady": 0.2}
    assert {entry["name"]: entry["ok"] for entry in (*checks_of(answers), *checks_of_misses(1.05, counted))} == {
        "Zipf 1.05: memory map / flexd": False,
        "Zipf 1.05: run-ahead / all fast, dense part": True,
        "Zipf 1.05: misses / LRU's": False,
        "Zipf 1.05: misses with 4 batches known / Belady's": True,
    }
    counted["Belady"] = 0.1
    assert [entry["ok"] for entry in checks_of_misses(1.05, counted)] == [False, False]
