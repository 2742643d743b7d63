"""The benchmark of re-planning: what a seed leaves out, and intervals in event time."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import bench_simulate
import numpy as np
import pytest
from bench_simulate import checks, leave_out, measure

from flexd.simulate.strategies import OVER_TIME
from flexd.stream.trace import Trace, built_in_trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    whole = built_in_trace(3)
    first = slice(0, 60_000)
    assert whole.user is not None
    return replace(
        whole, table=whole.table[first], row=whole.row[first], seconds=whole.seconds[first], user=whole.user[first]
    )


def test_a_seed_leaves_out_a_tenth_of_the_users_whole(trace: Trace) -> None:
    assert trace.user is not None
    kept = [leave_out(trace, seed) for seed in (1, 2, 1)]
    users = set(np.unique(trace.user).tolist())
    for one in kept:
        assert one.user is not None
        left = set(np.unique(one.user).tolist())
        assert 0.8 < len(left) / len(users) < 0.98
        assert (np.isin(trace.user, list(left)).sum()) == len(one)
        assert (np.diff(one.seconds) >= 0).all()
    assert len(kept[0]) == len(kept[2]) != len(kept[1])
    without = leave_out(replace(trace, user=None), 1)
    assert without.user is None
    assert 0.88 < len(without) / len(trace) < 0.92


def test_intervals_are_shares_of_the_run_stated_in_event_time(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_simulate, "HISTORY", 8)
    arguments = argparse.Namespace(
        steps=40, samples="sequences", lengths="fixed", replica_fraction=0.05, micro_batches=1
    )
    summary = measure(tmp_path / "some.npz", arguments, trace, OVER_TIME, 0.1)
    steps = summary["steps"]
    assert steps >= 40
    settings = summary["settings"]
    assert settings["interval_steps"] == round(0.1 * steps)
    assert (settings["window_steps"], settings["checkpoint_steps"]) == (
        4 * settings["interval_steps"], 8 * settings["interval_steps"],
    )  # fmt: skip
    span = float(trace.seconds[-1] - trace.seconds[0])
    assert 0.05 * span < summary["interval_event_seconds"] < 0.12 * span
    assert set(summary["strategies"]) == {strategy.name for strategy in OVER_TIME}
    assert summary["least_over_bound"] >= 1
    names = [entry["name"] for entry in checks("t", summary)]
    assert "t: least exposed time of a step over its bound" in names
    broken = checks("t", summary | {"least_over_bound": 0.99})
    assert not next(entry["ok"] for entry in broken if "bound" in entry["name"])
