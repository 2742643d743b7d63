"""Cluster descriptions: curves, validation, YAML and presets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flexd.core.errors import TopologyError
from flexd.topology.cluster import Collective, CollectiveCurve, Link, StepCosts, WorldModel
from flexd.topology.files import (
    dump_cluster,
    load_cluster,
    load_preset,
    parse_cluster,
    preset_names,
    scale_model,
    write_cluster,
)

COSTS = {"sums_seconds": 2e-3, "copies_seconds": 1e-3, "row_bytes_per_second": 1e9}
CURVE = CollectiveCurve(1e-5, ((1e3, 1e8), (1e6, 5e9), (1e9, 2e10)))


def test_a_curve_interpolates_on_log_axes() -> None:
    assert CURVE.bandwidth(1e6) == pytest.approx(5e9)
    assert CURVE.bandwidth(1.0) == pytest.approx(1e8)
    assert CURVE.bandwidth(1e12) == pytest.approx(2e10)
    assert CURVE.bandwidth(10**4.5) == pytest.approx((1e8 * 5e9) ** 0.5)
    assert CURVE.seconds(0) == pytest.approx(1e-5)
    assert CURVE.seconds(1e6) == pytest.approx(1e-5 + 1e6 / 5e9)
    assert not CURVE.is_affine
    assert CollectiveCurve(0.0, ((1e3, 1e9), (1e6, 1e9))).is_affine


@given(st.floats(0, 1e12), st.floats(0, 1e12))
def test_a_larger_message_never_takes_less_time(one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert CURVE.seconds(small) <= CURVE.seconds(large) * (1 + 1e-12)


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_and_round_trip(name: str, tmp_path: Path) -> None:
    cluster = load_preset(name)
    assert cluster.name == name
    assert "github.com" in cluster.source
    for link in Link:
        for collective in Collective:
            # NVLink SHARP reduces in the switch: its bus bandwidth may pass the wire's.
            slack = 1.1 if (link, collective) == (Link.INTRA_NODE, Collective.ALL_REDUCE) else 1.0
            assert cluster.curve(link, collective).bandwidth(1e9) <= slack * cluster.link(link).wire_bytes_per_second
    inter = cluster.inter_node
    assert inter.all_to_all.bandwidth(1e9) < inter.all_reduce.bandwidth(1e9)
    assert inter.all_reduce.bandwidth(1e9) < cluster.intra_node.all_reduce.bandwidth(1e9)
    write_cluster(cluster, tmp_path / "c.yaml")
    assert load_cluster(tmp_path / "c.yaml") == cluster


def data() -> dict:
    return yaml.safe_load(dump_cluster(load_preset("azure-a100-200g")))


def broken(change) -> str:
    top = data()
    change(top)
    return yaml.safe_dump(top)


ONE = {"latency_seconds": 1e-6, "points": [[1e3, 1e9]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["inter_node"].pop("all_reduce"), r"inter_node\.all_reduce: "),
        (lambda d: d["inter_node"]["all_to_all"].update(points=[[1e6, float("nan")]]), r"all_to_all\.points\[0\]"),
        (lambda d: d["inter_node"]["all_to_all"].update(points=[[1e6]]), r"inter_node\.all_to_all\.points"),
        (lambda d: d["inter_node"]["all_to_all"].update(points=[]), r"inter_node\.all_to_all\.points: empty"),
        (lambda d: d["inter_node"]["all_to_all"].update(points=[[1e3, 1e9], [1e3, 2e9]]), "does not increase"),
        (lambda d: d["inter_node"]["all_to_all"].update(points=[[1e3, 1e6], [1e4, 1e9]]), "less time"),
        (lambda d: d["inter_node"]["all_to_all"].update(points=[[1e6, "fast"]]), r"all_to_all\.points\.0\.1: "),
        (lambda d: d["inter_node"]["all_to_all"].update(latency_seconds=-1), "latency_seconds: -1"),
        (lambda d: d["exposed"].update(sync=2), r"exposed\.sync"),
        (lambda d: d["exposed"].update(other=1), r"exposed\.other"),
        (lambda d: d.update(world={"nodes": 1, "local_ranks": 2, "all_to_all": ONE}), r"world\.nodes: 1"),
        (lambda d: d.update(step_costs={**COSTS, "sums_seconds": -1}), r"step_costs\.sums_seconds: -1"),
        (lambda d: d.update(step_costs={**COSTS, "row_bytes_per_second": 0}), r"row_bytes_per_second: 0"),
        (lambda d: d.update(version=1, ranks=4), "topology version 1 - version 2 is read: measure the links again"),
        (lambda d: d.pop("version"), "no topology version"),
        (lambda d: d.update(color="red"), "color: "),
        (lambda d: d["intra_node"].update(wire_bytes_per_second=0), r"intra_node\.wire_bytes_per_second"),
    ],
)
def test_invalid_files_are_refused_by_key(change, message: str) -> None:
    with pytest.raises(TopologyError, match=message) as caught:
        parse_cluster(broken(change), origin="my.yaml")
    assert str(caught.value).startswith("my.yaml")


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="cannot be read"):
        load_cluster(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(TopologyError, match="invalid YAML"):
        load_cluster(tmp_path / "bad.yaml")
    (tmp_path / "huge.yaml").write_bytes(b"#" * (2**20 + 10))
    with pytest.raises(TopologyError, match="larger"):
        load_cluster(tmp_path / "huge.yaml")
    with pytest.raises(TopologyError, match="cannot be written"):
        write_cluster(load_preset("h100-400g"), tmp_path / "no" / "c.yaml")
    with pytest.raises(TopologyError, match="one of azure-a100-200g"):
        load_preset("none")


def test_world_and_step_costs_are_kept_in_files_and_the_world_is_that_of_one_layout() -> None:
    world, costs = WorldModel(16, 16, CollectiveCurve(3e-5, ((1e4, 5e8),))), StepCosts(**COSTS)
    cluster = replace(load_preset("azure-a100-200g"), world=world, step_costs=costs)
    assert parse_cluster(dump_cluster(cluster), "x") == cluster
    assert cluster.of_layout(16, 16) == cluster
    assert cluster.of_layout(4, 2) == replace(cluster, world=None)
    bare = scale_model(cluster, 10).world
    assert bare is not None
    assert bare.all_to_all.latency_seconds == 3e-6
