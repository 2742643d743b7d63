"""Read and write cluster descriptions as YAML, load the presets that ship with flexd, and scale them for replays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from flexd.core.errors import TopologyError
from flexd.topology.cluster import Cluster, Collective, CollectiveCurve, Exposed, Link, LinkModel, StepCosts, WorldModel

FORMAT_VERSION = 1
MAX_FILE_BYTES = 2**20
_PRESETS = resources.files("flexd.topology") / "presets"


def preset_names() -> list[str]:
    """Return the names of the presets, sorted."""
    return sorted(item.name.removesuffix(".yaml") for item in _PRESETS.iterdir() if item.name.endswith(".yaml"))


def load_preset(name: str) -> Cluster:
    """Load a preset. Raises TopologyError, which lists the presets, if there is none of this name."""
    names = preset_names()
    if name not in names:
        raise TopologyError(f"no topology preset {name!r}", remedy=f"one of {', '.join(names)}")
    return parse_cluster((_PRESETS / f"{name}.yaml").read_text(encoding="utf-8"), origin=f"preset {name}")


def load_cluster(path: Path) -> Cluster:
    """Read a topology file. Raises TopologyError that names the file and the invalid key."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(f"{path}: cannot be read: {error}", remedy="give a readable UTF-8 YAML file") from error
    if len(data) > MAX_FILE_BYTES:
        raise TopologyError(f"{path}: larger than {MAX_FILE_BYTES} bytes", remedy="give a topology file")
    return parse_cluster(text, origin=str(path))


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write a file that ``load_cluster`` reads back as an equal cluster. Raises TopologyError if that fails."""
    try:
        path.write_text(dump_cluster(cluster), encoding="utf-8")
    except OSError as error:
        raise TopologyError(f"{path}: cannot be written: {error}", remedy="give a writable path") from error


def dump_cluster(cluster: Cluster) -> str:
    """Return the cluster as YAML text."""
    data: dict[str, Any] = {"version": FORMAT_VERSION, "name": cluster.name, "source": cluster.source}
    for link in Link:
        model = cluster.link(link)
        data[link.value] = {"wire_bytes_per_second": model.wire_bytes_per_second} | {
            collective.value: _curve_data(model.curve(collective)) for collective in Collective
        }
    if cluster.world is not None:
        world = cluster.world
        data["world"] = {
            "nodes": world.nodes, "local_ranks": world.local_ranks, "all_to_all": _curve_data(world.all_to_all),
        }  # fmt: skip
    if cluster.step_costs is not None:
        data["step_costs"] = dataclasses.asdict(cluster.step_costs)
    exposed = cluster.exposed
    data["exposed"] = {"forward": exposed.forward, "backward": exposed.backward, "sync": exposed.sync}
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def _curve_data(curve: CollectiveCurve) -> dict[str, Any]:
    data: dict[str, Any] = {
        "latency_seconds": curve.latency_seconds,
        "points": [list(point) for point in curve.points],
    }
    if curve.ranks:
        data["ranks"] = curve.ranks
    if curve.groups:
        data["groups"] = {
            group.ranks: {key: value for key, value in _curve_data(group).items() if key != "ranks"}
            for group in curve.groups
        }
    return data


def parse_cluster(text: str, origin: str) -> Cluster:
    """Parse YAML text. Raises TopologyError that starts with ``origin`` and names the invalid key."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise TopologyError(f"{origin}: invalid YAML: {error}", remedy="correct the syntax") from error
    optional = {"exposed", "world", "step_costs"}
    top = _mapping(data, origin, {"version", "name", "source", "intra_node", "inter_node", *optional}, optional)
    if top["version"] != FORMAT_VERSION:
        raise TopologyError(f"{origin}: version: {top['version']!r}", remedy=f"this flexd reads {FORMAT_VERSION}")
    share = {"forward", "backward", "sync"}
    exposed = _mapping(top.get("exposed", {}), f"{origin}: exposed", share, share)
    try:
        return Cluster(
            name=_text(top["name"], f"{origin}: name"),
            source=_text(top["source"], f"{origin}: source"),
            intra_node=_link(top["intra_node"], f"{origin}: intra_node"),
            inter_node=_link(top["inter_node"], f"{origin}: inter_node"),
            exposed=Exposed(**{key: _number(value, f"{origin}: exposed.{key}") for key, value in exposed.items()}),
            world=_world(top["world"], f"{origin}: world") if "world" in top else None,
            step_costs=_step_costs(top["step_costs"], f"{origin}: step_costs") if "step_costs" in top else None,
        )
    except TopologyError as error:
        if error.message.startswith(origin):
            raise
        raise TopologyError(f"{origin}: {error}") from error


def _link(data: Any, where: str) -> LinkModel:
    fields = _mapping(data, where, {"wire_bytes_per_second", *(c.value for c in Collective)}, set())
    curves = {c.value: _curve(fields[c.value], f"{where}.{c}") for c in Collective}
    return LinkModel(
        wire_bytes_per_second=_number(fields["wire_bytes_per_second"], f"{where}.wire_bytes_per_second"), **curves
    )


def _world(data: Any, where: str) -> WorldModel:
    fields = _mapping(data, where, {"nodes", "local_ranks", "all_to_all"}, set())
    return WorldModel(
        _count(fields["nodes"], f"{where}.nodes"),
        _count(fields["local_ranks"], f"{where}.local_ranks"),
        _curve(fields["all_to_all"], f"{where}.all_to_all"),
    )


def _step_costs(data: Any, where: str) -> StepCosts:
    given = _mapping(data, where, {field.name for field in dataclasses.fields(StepCosts)}, set())
    return StepCosts(**{key: _number(value, f"{where}.{key}") for key, value in given.items()})


def _curve(data: Any, where: str) -> CollectiveCurve:
    """Parse a curve. Files without group sizes have neither ``ranks`` nor ``groups``."""
    optional = {"ranks", "groups"}
    fields = _mapping(data, where, {"latency_seconds", "points", *optional}, optional)
    ranks = _count(fields["ranks"], f"{where}.ranks") if "ranks" in fields else 0
    others = fields.get("groups", {})
    if not isinstance(others, dict):
        raise TopologyError(f"{where}.groups: {others!r}", remedy="give a mapping of group sizes to curves")
    groups = [
        _single_curve(
            _mapping(curve, f"{where}.groups.{size}", {"latency_seconds", "points"}, set()),
            f"{where}.groups.{size}", _count(size, f"{where}.groups"), (),
        )
        for size, curve in others.items()
    ]  # fmt: skip
    return _single_curve(fields, where, ranks, tuple(sorted(groups, key=lambda curve: curve.ranks)))


def _single_curve(
    fields: Mapping[str, Any], where: str, ranks: int, groups: tuple[CollectiveCurve, ...]
) -> CollectiveCurve:
    rows = fields["points"]
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 2 for row in rows):
        raise TopologyError(f"{where}.points: {rows!r}", remedy="give a list of [message bytes, bytes per second]")
    points = tuple(
        (_number(size, f"{where}.points[{i}][0]"), _number(bandwidth, f"{where}.points[{i}][1]"))
        for i, (size, bandwidth) in enumerate(rows)
    )
    try:
        return CollectiveCurve(_number(fields["latency_seconds"], f"{where}.latency_seconds"), points, ranks, groups)
    except TopologyError as error:
        raise TopologyError(error.message.replace("curve", where, 1), remedy=error.remedy) from error


def _mapping(data: Any, where: str, keys: set[str], optional: set[str]) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise TopologyError(f"{where}: must be a mapping, got {type(data).__name__}")
    missing = sorted(keys - optional - data.keys())
    if missing:
        raise TopologyError(f"{where}: {missing[0]} is missing", remedy=f"keys: {', '.join(sorted(keys))}")
    unknown = sorted(str(key) for key in data.keys() - keys)
    if unknown:
        raise TopologyError(f"{where}: {unknown[0]} is not a known key", remedy=f"keys: {', '.join(sorted(keys))}")
    return data


def _count(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TopologyError(f"{where}: {value!r}", remedy="give a whole number")
    return value


def _number(value: Any, where: str) -> float:
    # YAML reads `1e9` (no dot) as text.
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TopologyError(f"{where}: {value!r} is not a number", remedy="give a number")
    return float(value)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise TopologyError(f"{where}: {value!r} is not text", remedy="give text")
    return value


PRODUCTION_RANK_BYTES = 15.5e6 * 256
"""Bytes that a rank looks up in a production step: about 15.5M rows of 256 bytes (TorchRec's 1,935-table example). Over
those of a rehearsal's step they are the factor at which plans weigh latencies as they would there."""


def scale_model(cluster: Cluster, factor: float) -> Cluster:
    """Return the same cluster with latencies and fixed costs divided by ``factor``, which keeps their ratio to bytes.

    Curves with several points keep their message sizes, so a scale model is exact for one-point curves only.

    Raises:
        TopologyError: the factor is not a finite number of at least 1.
    """
    if not 1 <= factor < float("inf"):
        raise TopologyError(f"scale {factor!r}", remedy="give a factor of at least 1")
    if factor == 1:
        return cluster

    costs = cluster.step_costs
    if costs is not None:
        costs = replace(costs, sums_seconds=costs.sums_seconds / factor, copies_seconds=costs.copies_seconds / factor)
    return replace(
        cluster.with_curves(lambda link, curve: curve.divide_latency(factor)),
        name=f"{cluster.name}-scale-model",
        source=f"{cluster.source} Latencies divided by {factor:g}: a scale model for runs whose steps move so many "
        "times fewer bytes than a production step.",
        step_costs=costs,
    )
