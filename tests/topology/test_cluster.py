"""Cluster descriptions: curves, validation, YAML and presets; curves fitted to synthetic and to disturbed times."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import TopologyError
from flexd.topology.cluster import Collective, CollectiveCurve, CollectiveTimes, Link, StepCosts, WorldModel, fit_curve
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
    bandwidths = [CURVE.bandwidth(size) for size in (1e6, 1.0, 1e12, 10**4.5)]
    assert bandwidths == pytest.approx([5e9, 1e8, 2e10, (1e8 * 5e9) ** 0.5])
    assert [CURVE.seconds(0), CURVE.seconds(1e6)] == pytest.approx([1e-5, 1e-5 + 1e6 / 5e9])
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
    curves = (inter.all_to_all, inter.all_reduce, cluster.intra_node.all_reduce)
    assert all(slow.bandwidth(1e9) < fast.bandwidth(1e9) for slow, fast in pairwise(curves))
    write_cluster(cluster, tmp_path / "c.yaml")
    assert load_cluster(tmp_path / "c.yaml") == cluster


def broken(change) -> str:
    top = yaml.safe_load(dump_cluster(load_preset("azure-a100-200g")))
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
    assert scale_model(cluster, 10).world.all_to_all.latency_seconds == 3e-6


SIZES = 1024.0 * 4.0 ** np.arange(9)


def times_of(seconds: np.ndarray, repeats: int = 1) -> CollectiveTimes:
    return CollectiveTimes(SIZES[: len(seconds)], tuple(np.full(repeats, value) for value in seconds))


def seconds_of(curve: CollectiveCurve) -> np.ndarray:
    return np.array([curve.seconds(size) for size in SIZES])


def largest_error(fitted: CollectiveCurve, true: CollectiveCurve, sizes: np.ndarray = SIZES) -> float:
    return max(abs(fitted.seconds(size) / true.seconds(size) - 1) for size in sizes)


@settings(deadline=None)
@given(st.floats(1e-7, 1e-2), st.floats(1e7, 4e11))
def test_a_constant_bandwidth_is_recovered_exactly(latency: float, bandwidth: float) -> None:
    true = CollectiveCurve(latency, ((1e6, bandwidth),))
    fitted = fit_curve(times_of(seconds_of(true)))
    assert largest_error(fitted, true, np.geomspace(64, SIZES[-1], 60)) < 0.06
    # Where all is latency, the bytes of a size beyond those measured are priced by the bound that they gave.
    assert largest_error(fitted, true, np.array([2 * SIZES[-1]])) < 0.11
    if SIZES[-1] / bandwidth > 0.1 * latency:  # else all of it is latency, and the bandwidth cannot be known
        assert fitted.latency_seconds == pytest.approx(latency, rel=1e-5, abs=1e-9)
        assert fitted.bandwidth(2**27) == pytest.approx(bandwidth, rel=1e-4)


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e11), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_noise_and_outliers_change_the_fit_little(latency: float, bandwidth: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    true = CollectiveCurve(latency, ((1e6, bandwidth),))
    samples = []
    for seconds in seconds_of(true):
        noisy = seconds * (1 + 0.05 * rng.standard_normal(9).clip(-2, 2))
        noisy[rng.integers(9)] *= 50  # another process had the machine
        samples.append(noisy)
    assert largest_error(fit_curve(CollectiveTimes(SIZES, tuple(samples))), true) < 0.16


@settings(deadline=None)
@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=9))
def test_any_positive_times_give_a_valid_curve(seconds: list[float]) -> None:
    fitted = fit_curve(times_of(np.array(seconds)))
    fitted.check_points("curve")
    assert 0 <= fitted.latency_seconds <= min(seconds) * (1 + 1e-6)
    grid = [fitted.seconds(size) for size in np.geomspace(1, 2**30, 100)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(grid))
