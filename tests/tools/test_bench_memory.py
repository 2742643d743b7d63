"""A table larger than memory: every way learns the same, and the checks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from bench_memory import checks_of, disk_shares, main, of_trace
from bench_memory_job import Flexd, Tensors, batches, popular_rows, trace_batches
from memory_dense import NO_DENSE
from memory_misses import misses

SETTING = {"rows": 3_000, "dim": 8, "ids": 500, "fast_bytes": 40_000}


@pytest.mark.parametrize(("ahead", "static"), [(False, False), (True, False), (False, True)])
def test_all_ways_train_the_same(tmp_path: Path, ahead: bool, static: bool) -> None:
    mapped = Tensors(SETTING, tmp_path)
    (tmp_path / "rows").mkdir()
    held = Flexd(SETTING, tmp_path / "rows", ahead=ahead, static=static)
    drawn = batches(3_000, 500, 1.05, seed=3)
    given = [next(drawn) for _ in range(4)]
    for ids in given:
        held.step(ids, NO_DENSE.runner())
    for ids in given[: 3 if ahead else 4]:  # the last one is still to come
        mapped.step(ids, NO_DENSE.runner())
    figures = held.figures()
    assert 0 < figures["frames"] < 3_000
    assert figures["missed"] > 0
    for visit in held._kept:
        visit.close()
    assert torch.allclose(held._collection.gather_table("item"), mapped._rows, rtol=1e-5)
    assert not torch.equal(mapped._rows, torch.ones(3_000, 8))
    held.close()


def test_static_rows_stay_and_the_others_are_missed(tmp_path: Path) -> None:
    setting = SETTING | {"fast_bytes": 160_000, "ids": 100}
    held = Flexd(setting, tmp_path, static=True)
    frames = held.figures()["frames"]
    kept = popular_rows(3_000, int(frames) - 200)
    others = popular_rows(3_000, 3_000)[int(frames) - 200 :]
    before = held.figures()["missed"]
    for first in range(0, len(others), 100):
        held.step(others[first : first + 100], NO_DENSE.runner())
    assert held.figures()["missed"] - before == len(others)
    held.step(kept[:150], NO_DENSE.runner())
    assert held.figures()["missed"] - before == len(others)
    held.close()


def test_misses_are_those_of_ordered_policies() -> None:
    figures = misses(1_000_000, 2_000, 1.05, 60)
    for moved in ("", "moved: "):
        order = [figures[f"{moved}{policy}"] for policy in ("Belady", "flexd, 4 ahead", "flexd", "LRU")]
        assert order == sorted(order)
    assert figures["moved: static"] > 1.5 * figures["moved: flexd"] > 0
    assert figures["static"] < figures["LRU"]


@pytest.mark.long
def test_quick_skips_or_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ways = ["flexd, run-ahead", "all fast", "flexd"]
    code = main(["--quick", "--counted-steps", "0", "--directory", str(tmp_path), "--only", *ways])
    printed = capsys.readouterr()
    assert code == 0, printed
    if "skipped" not in printed.out:
        assert printed.out.count("with a dense part of") == 2
        assert printed.out.count("of the disk's best") == 2
    assert list(tmp_path.iterdir()) == []


def test_a_trace_has_rows_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    generator = np.random.default_rng(1)
    np.savez(
        path, ts=np.arange(6_000) / 60, table=np.zeros(6_000, dtype=np.int64),
        row=generator.integers(0, 900, 6_000), table_names=["item"], table_rows=[1_000],
    )  # fmt: skip
    setting = of_trace(path)
    assert setting["rows"] * setting["dim"] * 4 * 0.05 <= setting["fast_bytes"]
    drawn = trace_batches(path, 2_048)
    once = [next(drawn) for _ in range(2)]
    assert 800 < len(torch.cat(once).unique()) <= setting["rows"]
    assert torch.cat(once).max() < setting["rows"] <= 900
    assert torch.equal(next(drawn), once[0])


def test_frames_begin_with_the_popular_rows(tmp_path: Path) -> None:
    held = Flexd(SETTING, tmp_path)
    held.begin(zipf=1.05)
    frames = int(held.figures()["frames"])
    held.step(popular_rows(3_000, frames), NO_DENSE.runner())
    assert held.figures()["missed"] == 0
    held.step(torch.arange(frames // 4), NO_DENSE.runner())
    missed = held.figures()["missed"]
    kept = popular_rows(3_000, frames)[: frames // 4]
    held.step(kept, NO_DENSE.runner())
    assert held.figures()["missed"] - missed < len(kept) / 4, "the most popular leave last"
    held.close()


def test_checks() -> None:
    def way(seconds: float, **more: float) -> dict[str, dict[str, float]]:
        return {"1.05": {"step_seconds": seconds, **more}}

    disk = {"block_bytes": 4096.0, "reads a second, 1 in flight": 10.0, "reads a second, 32 in flight": 100.0}
    flexd = way(1.0, slow_seconds=0.5, bytes_read=40 * 4096.0, bytes_written=10 * 4096.0) | {"disk": disk}
    assert disk_shares(flexd) == {"1.05": pytest.approx(0.8)}
    answers: dict = {"memory map": way(19.0), "RocksDB": way(3.0), "flexd": flexd, "flexd, LRU": {"error": "none"}}
    answers |= {"all fast": way(0.1, device_step_seconds=1.0)}
    answers |= {"flexd, run-ahead": way(0.5, device_step_seconds=1.05)}
    counted = {f"{moved}{name}": value for moved in ("", "moved: ") for name, value in (
        ("static", 0.5), ("LRU", 0.3), ("flexd", 0.31), ("flexd, 4 ahead", 0.24), ("Belady", 0.2))}  # fmt: skip
    counted["moved: Belady"] = 0.1
    assert {entry["name"]: entry["ok"] for entry in checks_of(answers, {"1.05": counted})} == {
        "Zipf 1.05: memory map / flexd": False, "Zipf 1.05: RocksDB / flexd": True,
        "Zipf 1.05: run-ahead / all fast, dense part": True, "Zipf 1.05: share of the disk's limit": False,
        "Zipf 1.05: misses / LRU's": False, "Zipf 1.05: moved: misses / LRU's": False,
        "Zipf 1.05: misses with 4 batches known / Belady's": True,
        "Zipf 1.05: moved: misses with 4 batches known / Belady's": False,
    }  # fmt: skip
