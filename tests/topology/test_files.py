"""Cluster descriptions: curves, validation, YAML and presets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flexd.core.errors import TopologyError
from flexd.topology.cluster import Cluster, Collective, CollectiveCurve, Link, LinkModel, StepCosts, WorldModel
from flexd.topology.files import dump_cluster, load_cluster, load_preset, parse_cluster, preset_names, write_cluster

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
        (lambda d: d.pop("inter_node"), "inter_node is missing"),
        (lambda d: d["inter_node"].pop("all_reduce"), "inter_node: all_reduce is missing"),
        (lambda d: d["intra_node"]["all_gather"].pop("points"), r"intra_node\.all_gather: points is missing"),
        (
            lambda d: d["inter_node"]["all_to_all"].update(points=[[1e6, float("nan")]]),
            r"inter_node\.all_to_all\.points",
        ),
        (lambda d: d["inter_node"]["all_to_all"].update(points=[[1e6]]), r"inter_node\.all_to_all\.points"),
        (lambda d: d["inter_node"]["all_to_all"].update(points=[[1e3, 1e9], [1e3, 2e9]]), "does not increase"),
        (lambda d: d["inter_node"]["all_to_all"].update(points=[[1e3, 1e6], [1e4, 1e9]]), "less time"),
        (lambda d: d["inter_node"]["all_to_all"].update(points=[[1e6, "fast"]]), r"points\[0\]\[1\]: 'fast'"),
        (lambda d: d["inter_node"]["all_to_all"].update(latency_seconds=True), "latency_seconds: True"),
        (lambda d: d["exposed"].update(sync=2), r"exposed\.sync"),
        (lambda d: d["exposed"].update(other=1), "other is not a known key"),
        (lambda d: d["inter_node"]["all_to_all"].update(ranks=1), r"inter_node\.all_to_all\.ranks: 1"),
        (lambda d: d["inter_node"]["all_to_all"].update(groups={2: ONE}), r"all_to_all\.ranks: 0"),
        (lambda d: d["inter_node"]["all_to_all"].update(ranks=4, groups={4: ONE}), r"all_to_all\.groups: 4"),
        (lambda d: d["inter_node"]["all_to_all"].update(ranks=4, groups={"two": ONE}), r"groups: 'two'"),
        (lambda d: d["inter_node"]["all_to_all"].update(ranks=4, groups={2: {**ONE, "ranks": 2}}), "not a known key"),
        (
            lambda d: d["inter_node"]["all_to_all"].update(ranks=4, groups={2: {**ONE, "points": []}}),
            r"inter_node\.all_to_all\.groups\.2\.points",
        ),
        (lambda d: d.update(world={"nodes": 2, "all_to_all": ONE}), "world: local_ranks is missing"),
        (lambda d: d.update(world={"nodes": 1, "local_ranks": 2, "all_to_all": ONE}), r"world\.nodes: 1"),
        (lambda d: d.update(step_costs={"sums_seconds": 1.0}), "step_costs: copies_seconds is missing"),
        (lambda d: d.update(step_costs={**COSTS, "sums_seconds": -1}), r"step_costs\.sums_seconds: -1"),
        (lambda d: d.update(step_costs={**COSTS, "copies_seconds": "x"}), r"step_costs\.copies_seconds: 'x'"),
        (lambda d: d.update(step_costs={**COSTS, "row_bytes_per_second": 0}), r"row_bytes_per_second: 0"),
        (lambda d: d.update(version=7), "version"),
        (lambda d: d.update(color="red"), "color is not a known key"),
        (lambda d: d.update(source=3), "source: 3 is not text"),
        (lambda d: d["intra_node"].update(wire_bytes_per_second=0), r"intra_node\.wire_bytes_per_second"),
    ],
)
def test_invalid_files_are_refused_by_key(change, message: str) -> None:
    with pytest.raises(TopologyError, match=message) as caught:
        parse_cluster(broken(change), origin="my.yaml")
    assert str(caught.value).startswith("my.yaml")


def test_step_costs_are_read_back_and_no_part_of_a_rehearsal(tmp_path: Path) -> None:
    cluster = replace(load_preset("h100-400g"), step_costs=StepCosts(**COSTS))
    write_cluster(cluster, tmp_path / "c.yaml")
    assert load_cluster(tmp_path / "c.yaml") == cluster
    assert cluster.of_layout(2, 2).step_costs == cluster.step_costs
    assert cluster.bandwidth_only().step_costs is None


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


def of_sizes(latency: float, bandwidth: float) -> CollectiveCurve:
    """Return a curve of 16 ranks, with those of 2 ranks and of 4: a quarter and half of its time."""
    small = [CollectiveCurve(latency / by, ((1e3, by * bandwidth), (1e6, by * bandwidth)), 8 // by) for by in (4, 2)]
    return CollectiveCurve(latency, ((1e4, bandwidth),), 16, tuple(small))


def grouped() -> Cluster:
    intra, inter = of_sizes(1e-6, 1e10), of_sizes(1e-5, 1e9)
    world = WorldModel(16, 16, CollectiveCurve(3e-5, ((1e4, 5e8),), 256))
    return Cluster("g", "made up", LinkModel(1e11, *[intra] * 3), LinkModel(1e10, *[inter] * 3), world=world)


def test_times_between_two_group_sizes_are_interpolated_beyond_them_the_nearest_counts() -> None:
    curve = of_sizes(8e-6, 1e9)
    for size in (1.0, 1e3, 1e5, 1e7):
        times = {ranks: curve.of_group(ranks).seconds(size) for ranks in (1, 2, 4, 8, 16, 100)}
        assert times[16] == times[100] == curve.seconds(size)
        assert times[2] == times[1] == pytest.approx(times[16] / 4)
        assert times[4] == pytest.approx(times[16] / 2)
        # 8 ranks are half of the way from 4 to 16 on a logarithmic axis.
        assert times[8] == pytest.approx((times[4] + times[16]) / 2)
    assert [curve.of_group(ranks).ranks for ranks in (1, 2, 4, 8, 16, 100)] == [2, 2, 4, 8, 16, 16]
    assert curve.of_group(8).of_group(2) == curve.of_group(8)
    assert CURVE.of_group(7) == CURVE


@given(st.floats(1e3, 1e12), st.floats(1.0, 50.0), st.floats(1e3, 1e12), st.integers(3, 63))
def test_curves_between_two_group_sizes_are_valid(first: float, faster: float, other: float, ranks: int) -> None:
    small = CollectiveCurve(0.0, ((1e3, first), (2e5, first * faster)), 2)
    curve = CollectiveCurve(1e-5, ((777.0, other), (1e5, other), (1e9, other * faster)), 64, (small,))
    between = curve.of_group(ranks)
    for size in (777.0, 1e3, 1e5, 2e5, 1e9):
        low, high = sorted((small.seconds(size), curve.seconds(size)))
        assert low * (1 - 1e-9) <= between.seconds(size) <= high * (1 + 1e-9)


def test_a_layout_uses_the_curves_of_its_groups_and_its_own_world() -> None:
    cluster = grouped()
    own = cluster.of_layout(16, 16)
    assert own.world == cluster.world
    assert own.inter_node.all_to_all == CollectiveCurve(1e-5, ((1e4, 1e9),), 16)
    other = cluster.of_layout(4, 2)
    assert other.world is None
    assert other.inter_node.all_reduce.seconds(1e5) == pytest.approx(cluster.inter_node.all_reduce.seconds(1e5) / 2)
    assert other.intra_node.all_reduce.seconds(1e5) == pytest.approx(cluster.intra_node.all_reduce.seconds(1e5) / 4)
    assert load_preset("azure-a100-200g").of_layout(3, 5) == load_preset("azure-a100-200g")


def test_group_sizes_and_the_world_are_kept_in_files_and_have_no_latency_without() -> None:
    cluster = grouped()
    assert parse_cluster(dump_cluster(cluster), "x") == cluster
    bare = cluster.bandwidth_only()
    assert bare.world is not None
    assert bare.world.all_to_all.latency_seconds == 0.0
    assert {group.latency_seconds for group in bare.inter_node.all_to_all.groups} == {0.0}
