"""Fast memory divided anew while a training runs: the ways train the same, and frames follow the use."""

from __future__ import annotations

from pathlib import Path

import bench_redivide
import pytest
import torch
from bench_redivide import DIMS, drawn, plot, train


def test_frames_follow_the_use_and_tables_stay_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_redivide, "EVERY", 6)
    given = drawn(1_000, 128, 36)
    fast_bytes = int(0.2 * 1_000 * sum(4 * dim + 68 for dim in DIMS.values()))
    results = {way: train(way, given, 1_000, fast_bytes) for way in ("by rows", "planned once", "live")}
    first = results["by rows"]
    assert len({tuple(frames) for frames in first["frames"]}) == 1
    assert 150 < first["frames"][0][0] == first["frames"][0][1] <= 200, "the index of the files is part of the budget"
    for result in results.values():
        assert all(torch.equal(*pair) for pair in zip(first["tables"], result["tables"], strict=True))
    live, once = results["live"]["frames"], results["planned once"]["frames"]
    assert live[17][0] > first["frames"][0][0] > once[-1][1]
    assert live[-1][1] > live[17][1]
    assert sum(results["live"]["missed"][-6:]) < sum(results["planned once"]["missed"][-6:])
    pytest.importorskip("matplotlib")
    plot(tmp_path / "images" / "steps.png", results, 128)
    assert (tmp_path / "images" / "steps.png").stat().st_size > 10_000
