"""Read and write cluster descriptions as YAML, load the presets that ship with flexd, and scale them for replays."""

import dataclasses
from dataclasses import replace
from importlib import resources
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from flexd.core.errors import TopologyError
from flexd.topology.cluster import Cluster

FORMAT_VERSION = 2
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
    data = {"version": FORMAT_VERSION} | dataclasses.asdict(cluster)
    del data["exposed"]["cover_seconds"]  # of a step as ranks report it
    given = {key: value for key, value in data.items() if value is not None}
    return yaml.safe_dump(given, sort_keys=False, allow_unicode=True)


class _File(BaseModel):
    """The content of a file, but for its version."""

    model_config = ConfigDict(extra="forbid")
    cluster: Cluster


def parse_cluster(text: str, origin: str) -> Cluster:
    """Parse YAML text. Raises TopologyError that starts with ``origin`` and names the invalid key."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise TopologyError(f"{origin}: invalid YAML: {error}", remedy="correct the syntax") from error
    version = data.pop("version", None) if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise TopologyError(
            f"{origin}: " + ("no topology version" if version is None else f"topology version {version!r}"),
            remedy=f"version {FORMAT_VERSION} is read: measure the links again with flexd probe",
        )
    try:
        return _File.model_validate({"cluster": data}).cluster
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"][1:]))
        raise TopologyError(f"{origin}: {where}: {fault['msg']}", remedy="correct this key") from error
    except TopologyError as error:
        raise TopologyError(f"{origin}: {error.message}", remedy=error.remedy) from error


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
        cluster.with_curves(lambda link, curve: replace(curve, latency_seconds=curve.latency_seconds / factor)),
        name=f"{cluster.name}-scale-model",
        source=f"{cluster.source} Latencies divided by {factor:g}: a scale model for runs whose steps move so many "
        "times fewer bytes than a production step.",
        step_costs=costs,
    )
