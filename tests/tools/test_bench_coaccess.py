"""The benchmark of the co-access sample follows a trace in order and judges what its targets say."""

from __future__ import annotations

import bench_coaccess
import pytest
from bench_affinity import planted, uniform_samples


def test_homes_from_the_sketch_are_near_those_of_the_window_and_a_catalogue_is_not_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_coaccess, "_SMALL", (2, 16, 4))
    figures = {
        "planted trace": bench_coaccess.follow(planted(40 * 64)[0], 2, 32, 40),
        "catalogue, 2 nodes": bench_coaccess.follow(uniform_samples(100, 30 * 64, 16), 2, 32, 30),
        "longer, groups": bench_coaccess.longer(planted(256)[0]),
    }
    assert figures["planted trace"]["sketch"]["rows"] < 0.8
    assert figures["planted trace"]["memory_bytes"] >= 65_536
    figures = {name.replace("planted trace", "groups"): of for name, of in figures.items()}
    checks = bench_coaccess.checks_of(figures)
    assert {each["name"] for each in checks if each["name"].startswith("catalogue")} >= {"catalogue, 2 nodes: pays"}
    assert all(each["ok"] for each in checks if "pays" in each["name"]), checks
    figures["catalogue, 2 nodes"]["says_pays"] = True
    figures["groups"]["sketch"]["rows"] = 2 * figures["groups"]["window"]["rows"]
    missed = {each["name"] for each in bench_coaccess.checks_of(figures) if not each["ok"]}
    assert {"catalogue, 2 nodes: pays", "groups: rows over the window's"} <= missed
    assert bench_coaccess.follow(planted(64)[0], 2, 32, 10) == {}
