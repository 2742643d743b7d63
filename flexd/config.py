"""The daemon's YAML as pydantic models. An error names the key path, the value and what is allowed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from flexd.errors import ConfigError
from flexd.keyspace import DTYPE_BYTES, STATE_FLOATS_PER_ROW, KeySpace, TableSpec

ENV_PREFIX = "FLEXD__"

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Seconds = Annotated[float, Field(gt=0, le=86_400 * 365)]
Port = Annotated[int, Field(ge=0, le=65_535)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TableConfig(Section):
    """One embedding table. The list must equal the trainer's, in the same order."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    rows: Annotated[int, Field(ge=1, le=2**40)]
    dim: Annotated[int, Field(ge=1, le=65_536)]
    dtype: str = "float32"
    optimizer: str = "sgd"

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        if value not in DTYPE_BYTES:
            raise ValueError(f"must be one of {', '.join(DTYPE_BYTES)}")
        return value

    @field_validator("optimizer")
    @classmethod
    def _known_optimizer(cls, value: str) -> str:
        if value not in STATE_FLOATS_PER_ROW:
            raise ValueError(f"must be one of {', '.join(STATE_FLOATS_PER_ROW)}")
        return value


class FileLogSource(Section):
    """Append-only segment files with offsets; needs no broker."""

    kind: Literal["file_log"]
    path: Path
    """Directory of the log: one sub-directory a partition."""


class KafkaSource(Section):
    """A Kafka topic read in a consumer group."""

    kind: Literal["kafka"]
    bootstrap_servers: Annotated[str, Field(min_length=1)]
    topic: Annotated[str, Field(min_length=1)] = "flexd-accesses"
    group_id: Annotated[str, Field(min_length=1)] = "flexd"
    on_position_lost: Literal["earliest", "latest", "fail"] = "earliest"
    """What to do when the broker no longer has the saved position."""
    connect_timeout_seconds: Seconds = 15.0
    session_timeout_seconds: Seconds = 10.0
    client_options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Passed to kafka-python as they are: security_protocol, sasl_*, ssl_* ..."""


class SyntheticSource(Section):
    """Zipf accesses with drift, made in the daemon: for trying flexd without a trainer."""

    kind: Literal["synthetic"]
    zipf_exponent: Annotated[float, Field(gt=0, le=4)] = 1.05
    accesses_per_second: Annotated[float, Field(gt=0)] = 1_000_000
    drift_rows_per_second: Annotated[float, Field(ge=0)] = 0.0
    seed: int = 0


SourceConfig = Annotated[FileLogSource | KafkaSource | SyntheticSource, Field(discriminator="kind")]


class DeadLetterConfig(Section):
    """Samples of rejected messages."""

    path: Path | None = None
    """File to keep them in; default: ``dead-letters.jsonl`` in the state directory."""
    max_bytes: Annotated[int, Field(ge=0)] = 4 * 2**20
    max_message_bytes: Annotated[int, Field(ge=16)] = 512
    """How much of each rejected message is kept."""


class StreamConfig(Section):
    source: SourceConfig
    max_message_bytes: Annotated[int, Field(ge=1024)] = 16 * 2**20
    """A larger message is rejected unread."""
    poll_seconds: Seconds = 0.2
    dead_letters: DeadLetterConfig = DeadLetterConfig()


class SketchConfig(Section):
    memory_bytes: Annotated[int, Field(ge=2**20)] = 512 * 2**20
    """For all counters together: decides dense or count-min for each table."""
    half_life_seconds: Annotated[float, Field(gt=0)] | None = 3600.0
    """Event-time half-life of an access; null counts for ever."""
    max_hot_rows: Annotated[int, Field(ge=1)] = 1_000_000
    """Rows listed one by one in the profile, per table."""
    max_future_seconds: Annotated[float, Field(ge=0)] = 300.0
    """Accesses dated further ahead of the newest event than this are counted as of the newest event."""


class TopologyConfig(Section):
    """Which cluster: bandwidths and latencies. Nodes and ranks come from the ranks' hellos."""

    preset: str | None = None
    """A preset that ships with flexd."""
    file: Path | None = None
    """A topology file."""

    @model_validator(mode="after")
    def _one_of(self) -> TopologyConfig:
        if self.preset is not None and self.file is not None:
            raise ValueError("give `preset` or `file`, not both")
        return self


class PlannerConfig(Section):
    interval_seconds: Seconds = 300.0
    """Time between automatic plans."""
    min_spacing_seconds: Annotated[float, Field(ge=0)] = 1.0
    horizon_steps: Annotated[float, Field(gt=0)] = 10_000
    """Steps over which a migration must pay for itself (hysteresis)."""
    min_samples: Annotated[int, Field(ge=0)] = 10_000
    """No plan is made from fewer accesses than this."""
    min_coverage: Annotated[float, Field(ge=0, le=1)] = 0.5
    batch_accesses_per_step: Annotated[float, Field(gt=0)] | None = None
    """Accesses of the whole job per step, used until the ranks report their own."""


class ControlConfig(Section):
    listen_host: str = "127.0.0.1"
    listen_port: Port = 29_400
    secret_file: Path | None = None
    """Shared secret of daemon and ranks (HMAC-SHA256). Without it messages are not authenticated:
    allowed on loopback only."""
    chunk_rows: Annotated[int, Field(ge=1, le=2**22)] = 4096
    """Largest chunk the daemon announces."""
    chunk_bytes: Annotated[int, Field(ge=1)] = 4 * 2**20
    """Row values (with optimizer state) that one chunk may move; ranks apply at most one chunk's worth a step."""
    timeout_seconds: Seconds = 15.0
    """Deadline of every wait on the channel."""

    @model_validator(mode="after")
    def _secret_beyond_loopback(self) -> ControlConfig:
        if self.secret_file is None and self.listen_host not in ("127.0.0.1", "localhost", "::1"):
            raise ValueError(
                f"listen_host {self.listen_host!r} is reachable from other machines: set control.secret_file"
            )
        return self


class ServerConfig(Section):
    host: str = "127.0.0.1"
    port: Port = 9464
    unix_socket: Path | None = None
    """Serve the API on this socket instead of TCP."""

    @model_validator(mode="after")
    def _loopback_only(self) -> ServerConfig:
        if self.unix_socket is None and self.host not in ("127.0.0.1", "localhost", "::1"):
            raise ValueError(f"host {self.host!r}: the admin API binds loopback or a unix socket only")
        return self


class StateConfig(Section):
    dir: Path = Path("flexd-state")
    snapshot_interval_seconds: Seconds = 30.0
    keep_snapshots: Annotated[int, Field(ge=1, le=1000)] = 3


class LogConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class Config(Section):
    """The whole file."""

    job: Name
    tables: Annotated[list[TableConfig], Field(min_length=1)]
    stream: StreamConfig
    sketch: SketchConfig = SketchConfig()
    topology: TopologyConfig = TopologyConfig()
    planner: PlannerConfig = PlannerConfig()
    control: ControlConfig = ControlConfig()
    server: ServerConfig = ServerConfig()
    state: StateConfig = StateConfig()
    log: LogConfig = LogConfig()
    shutdown_seconds: Annotated[float, Field(gt=0, le=300)] = 20.0
    """SIGTERM to exit, at most."""

    @model_validator(mode="after")
    def _unique_tables(self) -> Config:
        names = [table.name for table in self.tables]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"tables named twice: {', '.join(twice)}")
        return self

    def keyspace(self) -> KeySpace:
        return KeySpace([TableSpec(t.name, t.rows, t.dim, t.dtype, t.optimizer) for t in self.tables])


def load_config(path: Path, environ: Mapping[str, str] = os.environ) -> Config:
    """Reads a YAML file, lays ``FLEXD__A__B=value`` over it, and checks it.

    Raises:
        ConfigError: the file cannot be read, is no YAML mapping, or a value is not allowed; the text lists every
            fault as ``key.path: what (got value)``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", remedy="give a readable UTF-8 YAML file") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}, column {where.column + 1}" if where else ""
        raise ConfigError(f"{path}: no valid YAML{line}: {getattr(error, 'problem', error)}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: the top level must be a mapping, got {type(data).__name__}")
    return parse_config(_overlay(data, environ), origin=str(path))


def parse_config(data: Mapping[str, Any], origin: str = "config") -> Config:
    """Checks an already parsed mapping. Raises ConfigError as ``load_config`` does."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{origin}: {line}" for line in _faults(error))) from error


def _faults(error: ValidationError) -> list[str]:
    lines = []
    for fault in error.errors(include_url=False):
        path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in fault["loc"]).lstrip(".") or "(top level)"
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "missing":
            lines.append(f"{path}: is required")
        elif fault["type"] == "extra_forbidden":
            lines.append(f"{path}: is not a known key")
        else:
            value = repr(fault["input"])
            lines.append(f"{path}: {message} (got {value if len(value) <= 120 else value[:117] + '...'})")
    return lines


def _overlay(data: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """``FLEXD__CONTROL__LISTEN_PORT=1`` sets ``control.listen_port``; values are parsed as YAML scalars."""
    merged: dict[str, Any] = dict(data)
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX):
            continue
        path = variable.removeprefix(ENV_PREFIX).lower().split("__")
        node = merged
        for key in path[:-1]:
            child = node.get(key)
            if child is not None and not isinstance(child, dict):
                raise ConfigError(
                    f"environment variable {variable}: {key!r} is not a section",
                    remedy="name keys as FLEXD__SECTION__KEY",
                )
            node[key] = dict(child or {})
            node = node[key]
        node[path[-1]] = yaml.safe_load(environ[variable])
    return merged
