"""The benchmark of the co-access sample follows a trace in order and judges what its targets say."""

from __future__ import annotations

import bench_coaccess
import pytest
from bench_affinity import planted


def test_homes_from_the_sketch_are_near_those_of_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_coaccess, "_SMALL", (2, 16, 4))
    figures = {
        "planted trace": bench_coaccess.follow(planted(40 * 64)[0], 2, 32, 40),
        "longer, groups": bench_coaccess.longer(planted(256)[0]),
    }
    assert figures["planted trace"]["sketch"]["rows"] < 0.8
    assert figures["planted trace"]["memory_bytes"] >= 65_536
    figures = {name.replace("planted trace", "groups"): of for name, of in figures.items()}
    figures["groups"]["sketch"]["rows"] = 2 * figures["groups"]["window"]["rows"]
    missed = {each["name"] for each in bench_coaccess.checks_of(figures) if not each["ok"]}
    assert "groups: rows over the window's" in missed
    assert bench_coaccess.follow(planted(64)[0], 2, 32, 10) == {}
