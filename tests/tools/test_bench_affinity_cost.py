"""The benchmark of what affinity costs measures a full sample, a plan and a batch."""

from __future__ import annotations

import bench_affinity_cost
import pytest
from bench_affinity import planted

from flexd.core.layout import RankLayout


def test_costs_are_of_the_whole_batch_and_the_full_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_affinity_cost, "_SECONDS", 0.0)
    monkeypatch.setattr(bench_affinity_cost, "SAMPLE_BYTES", 1 << 16)
    samples = planted(4_000)[0]
    sample, offered = bench_affinity_cost.sample_figures(samples)
    assert 0 < offered["filling_us"] < 1_000
    assert 0 < offered["full_us"] < 1_000
    monkeypatch.setattr(bench_affinity_cost, "PER_RANK", 8)
    layout = RankLayout(2, 4)
    learn = bench_affinity_cost.learn_figures(sample, layout, 6_400)
    assert 0.5 * 65_536 / 96 < learn["samples"] < 65_536 / 80
    assert learn["share_of_a_core"] == pytest.approx(learn["seconds"] / 300)
    assert learn["peak_bytes"] > 4 * 15 * learn["samples"]
