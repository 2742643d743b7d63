"""A table of a billion rows: the tool's smaller run, and what it compares."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench_billion_rows import difference, run
from bench_memory_job import Flexd, batches

SETTING = {"rows": 10**8, "dim": 8, "ids": 300, "fast_bytes": 60_000, "filled": False}


def test_a_hundred_million_rows_begin_empty_and_train_as_plain_rows_do(tmp_path: Path) -> None:
    figures = run(10**8, 8, 300, 60_000, 0.0, tmp_path)
    assert figures["file_bytes"] > 10**8 * 8 * 4
    assert 0 < figures["file_bytes_on_disk"] < 2**26
    assert 0 < figures["frames"] < 1_000
    assert figures["difference"] < 1e-6
    assert figures["resident_bytes"] - figures["resident_bytes_before"] < 10**8 * 8 * 4 / 2
    assert list(tmp_path.iterdir()) == []


def test_rows_that_were_not_trained_alike_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Flexd(SETTING, tmp_path)
    drawn = batches(10**8, 300, 1.05, seed=1)
    assert difference(held, [next(drawn) for _ in range(2)]) < 1e-6
    monkeypatch.setattr(held, "step", lambda ids, dense: None)
    assert difference(held, [torch.arange(5)]) > 0.1
    held.close()
