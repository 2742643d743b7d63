"""The daemon's whole YAML file as one pydantic model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from flexd.config.base import Float, Int, Name, Seconds, Section, redacted
from flexd.config.sections import ControlConfig, PlannerConfig, ServerConfig, SketchConfig, StreamConfig, TopologyConfig
from flexd.core.errors import ConfigError
from flexd.core.keyspace import KeySpace, RowDType, RowOptimizer, TableSpec
from flexd.core.sharding_types import ROW_WISE, ShardingType


class TableConfig(Section):
    """One embedding table. The list, if there is one, must equal the trainer's, in the same order."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    """Name of the table in the stream's messages and in the trainer."""
    rows: Annotated[Int, Field(ge=1, le=2**40)]
    """Number of rows; row ids are 0 to rows - 1."""
    dim: Annotated[Int, Field(ge=1, le=65_536)]
    """Length of a row's vector."""
    dtype: RowDType = "float32"
    """Type of the rows."""
    optimizer: RowOptimizer = "sgd"
    """Decides how much optimizer state migrates with a row."""
    sharding: str = ROW_WISE
    """Sharding type, as the trainer has it: ``row_wise`` (rows spread over all ranks), ``table_row_wise:N`` (over the
    ranks of node N), ``table_wise:R`` (whole on rank R) or ``data_parallel`` (spread, with copies of all rows
    everywhere). Plans copy rows of ``row_wise`` tables alone."""

    @field_validator("sharding")
    @classmethod
    def _known_rule(cls, value: str) -> str:
        try:
            ShardingType.parse(value)
        except ConfigError as error:
            raise ValueError(f"must be {error.remedy}") from error
        return value


class StateConfig(Section):
    """State on disk, which survives a restart."""

    dir: Path = Path("flexd-state")
    """Directory of snapshots and journal; each daemon needs its own."""
    snapshot_interval_seconds: Seconds = 30.0
    """Time between snapshots; after a crash the stream is read again from the newest."""
    keep_snapshots: Annotated[Int, Field(ge=1, le=1000)] = 3
    """Number of snapshots to keep; older ones are deleted."""
    on_unusable: Literal["exit", "wait", "reset"] = "exit"
    """Reaction of a start to saved state that it cannot continue from (of a newer flexd, damaged, or of other
    tables). ``exit``: end with exit status 9. ``wait``: count nothing, serve the API, say why on ``/readyz``, and
    start once an operator has run ``flexd state reset``. ``reset``: rename it and start empty."""


class LogConfig(Section):
    """Log lines on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe lines to write."""
    format: Literal["text", "json"] = "text"
    """``text``, or ``json`` with one object a line."""


class Config(Section):
    """The whole file."""

    job: Name
    """Name of the training job; daemon and ranks must agree."""
    tables: list[TableConfig] = []
    """The embedding tables, as the trainer has them. Without a list the daemon takes them from the ranks and keeps
    them in its state; nothing is read from the stream before they are known."""
    stream: StreamConfig
    """The stream of accesses."""
    sketch: SketchConfig = SketchConfig()
    """Counters of accesses."""
    topology: TopologyConfig = TopologyConfig()
    """The cluster that prices the plans."""
    planner: PlannerConfig = PlannerConfig()
    """Planning."""
    control: ControlConfig = ControlConfig()
    """The channel to the ranks."""
    server: ServerConfig = ServerConfig()
    """Admin API and metrics."""
    state: StateConfig = StateConfig()
    """State on disk."""
    log: LogConfig = LogConfig()
    """Log lines."""
    shutdown_seconds: Annotated[Float, Field(gt=0, le=300)] = 20.0
    """Deadline from SIGTERM to the exit of the process."""

    @model_validator(mode="before")
    @classmethod
    def _group_of_the_job(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(stream := given.get("stream"), dict):
            return given
        source = stream.get("source")
        if not isinstance(source, dict) or source.get("kind") != "kafka" or "group_id" in source:
            return given
        return {**given, "stream": {**stream, "source": {**source, "group_id": f"flexd-{given.get('job')}"}}}

    @field_validator("tables")
    @classmethod
    def _unique_tables(cls, value: list[TableConfig]) -> list[TableConfig]:
        twice = sorted(name for name, times in Counter(table.name for table in value).items() if times > 1)
        if twice:
            raise ValueError(f"each table needs its own name; named twice: {', '.join(twice)}")
        return value

    def keyspace(self) -> KeySpace:
        """Return the key space of the tables. Raises ConfigError if there are none."""
        if not self.tables:
            raise ConfigError(
                "tables: the file lists none, and the state has none of the ranks",
                remedy="list them, or start the training once with a daemon that runs",
            )
        return KeySpace([TableSpec(t.name, t.rows, t.dim, t.dtype, t.optimizer, t.sharding) for t in self.tables])

    def document(self) -> dict[str, Any]:
        """Return the effective configuration as plain JSON values, without secrets."""
        shown: dict[str, Any] = redacted(self.model_dump(mode="json"))
        return shown
