"""The daemon's whole YAML file as one pydantic model: loaded from the file and the environment, checked beyond its
schema, and split by what needs a restart when it has changed.

Errors name key path, value and allowed values. ``flexd run``, ``flexd check-config`` and a reload call the same
functions, so one refuses what the others refuse. Secrets and certificates are not checked: they are often mounted only
where the daemon runs.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from flexd.config.base import (
    Float,
    Int,
    Name,
    Seconds,
    Section,
    UniqueNames,
    describe_faults,
    overlay_environment,
    read_yaml_mapping,
    redacted,
    split_address,
)
from flexd.config.sections import (
    ControlConfig,
    KafkaSourceConfig,
    PlannerConfig,
    ServerConfig,
    SketchConfig,
    StreamConfig,
    TopologyConfig,
)
from flexd.core.errors import ConfigError, SketchError, StreamError, TopologyError
from flexd.core.keyspace import KeySpace, RowDType, RowOptimizer, TableSpec
from flexd.core.sharding_types import ROW_WISE, ShardingType

if TYPE_CHECKING:
    from flexd.topology.cluster import Cluster


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
    ids: Literal["rows", "unbounded"] = "rows"
    """``unbounded``: any integers, which the trainer gives rows (``flexd.EmbeddingTable(ids="unbounded")``). A stream
    then says how many rows they deserve (``flexd advise``, ``flexd status``); rows are copied only where a tap counts
    them."""
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
    tables: Annotated[list[TableConfig], UniqueNames] = []
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

    def keyspace(self) -> KeySpace:
        """Return the key space of the tables. Raises ConfigError if there are none."""
        if not self.tables:
            raise ConfigError(
                "tables: the file lists none, and the state has none of the ranks",
                remedy="list them, or start the training once with a daemon that runs",
            )
        return KeySpace([TableSpec(t.name, t.rows, t.dim, t.dtype, t.optimizer, t.sharding) for t in self.tables])

    def unbounded(self) -> frozenset[str]:
        """Return the names of the tables of unbounded ids."""
        return frozenset(table.name for table in self.tables or () if table.ids == "unbounded")

    def cluster(self) -> Cluster:
        """Return the cluster. Raises TopologyError if the preset is not known, or the file cannot be used."""
        from flexd.topology.files import load_cluster, load_preset

        topology = self.topology
        return (
            load_preset(topology.preset or "azure-a100-200g") if topology.file is None else load_cluster(topology.file)
        )

    def document(self) -> dict[str, Any]:
        """Return the effective configuration as plain JSON values, without secrets."""
        return dict(redacted(self.model_dump(mode="json")))


HOT_KEYS: tuple[str, ...] = (
    "planner",
    "control.chunk_bytes",
    "control.throttle",
    "state.snapshot_interval_seconds",
    "state.keep_snapshots",
    "log.level",
    "log.format",
    "shutdown_seconds",
)
"""Key paths of keys or whole sections that apply at once. The others are read once at the start: addresses and files
are open, and counters have their size."""


@dataclass(frozen=True)
class Merged:
    """Result of ``merge``.

    Attributes:
        effective: the running configuration with the hot keys of the wanted one.
        applied: hot key paths that differ from the running configuration.
        pending: key paths that differ and need a restart.
    """

    effective: Config
    applied: tuple[str, ...]
    pending: tuple[str, ...]


def is_hot(path: str) -> bool:
    return any(path == key or path.startswith(f"{key}.") for key in HOT_KEYS)


def merge(running: Config, wanted: Config) -> Merged:
    """Merge the hot keys of ``wanted`` into ``running``.

    Raises:
        pydantic.ValidationError: the hot keys contradict the keys that stay.
    """
    changed: list[str] = []
    effective = Config.model_validate(_mixed(running, wanted, "", changed).model_dump())
    applied, pending = ([path for path in changed if is_hot(path) is hot] for hot in (True, False))
    return Merged(effective, tuple(applied), tuple(pending))


def _mixed(running: Any, wanted: Any, path: str, changed: list[str]) -> Any:
    """Return ``running`` with the hot values of ``wanted``, and append the paths that differ to ``changed``."""
    if type(running) is not type(wanted) or not isinstance(running, Section):
        if running == wanted:
            return running
        changed.append(path)
        return wanted if is_hot(path) else running
    return running.model_copy(
        update={
            name: _mixed(getattr(running, name), getattr(wanted, name), f"{path}.{name}" if path else name, changed)
            for name in type(running).model_fields
        }
    )


def load_config(path: Path, environ: Mapping[str, str] = os.environ) -> Config:
    """Read a YAML file, apply ``FLEXD__A__B=value`` variables, and validate the result.

    Raises:
        ConfigError: the file cannot be read, is no YAML mapping, or a value is not allowed; the text lists every
            fault as ``key.path: what is allowed (got value)``.
    """
    data, variables = overlay_environment(read_yaml_mapping(path), environ)
    return parse_config(data, origin=str(path), variables=variables)


def parse_config(data: Mapping[str, Any], origin: str = "config", variables: Mapping[str, str] | None = None) -> Config:
    """Validate a parsed mapping; ``variables`` maps key paths to the environment variables that set them.

    Raises:
        ConfigError: as ``load_config``.
    """
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        faults = describe_faults(error, Config, variables or {})
        raise ConfigError("\n".join(f"{origin}: {line}" for line in faults)) from None


_MAX_NAMED = 5


def check_config(config: Config, origin: str = "config") -> None:
    """Check everything that can be known before the daemon starts.

    Args:
        origin: the file that the configuration comes from; begins every line of the error.

    Raises:
        ConfigError: the text lists every fault as ``origin: key.path: what is wrong``.
    """
    faults = [*_topology_faults(config), *_kafka_faults(config), *_port_faults(config)]
    if config.planner.rehomed_slots_share and not config.sketch.coaccess_memory_bytes:
        faults.append(
            "planner.rehomed_slots_share: where rows are used together is not known; set sketch.coaccess_memory_bytes"
        )
    if config.tables:  # else they are checked when the ranks have said theirs
        faults = [*_table_faults(config), *_memory_faults(config), *faults]
    _raise(faults, origin)


def check_tables(config: Config, origin: str = "config") -> None:
    """Check that ``planner`` names only tables and rows that ``tables`` has.

    Raises:
        ConfigError: the text lists every fault as ``origin: key.path: what is wrong``.
    """
    if config.tables:
        _raise(list(_table_faults(config)), origin)


def _raise(faults: list[str], origin: str) -> None:
    if faults:
        raise ConfigError("\n".join(f"{origin}: {fault}" for fault in faults))


def _table_faults(config: Config) -> Iterator[str]:
    planner = config.planner
    rows_of = {table.name: table.rows for table in config.tables}
    ruled = {table.name for table in config.tables if table.sharding != ROW_WISE}
    unknown = sorted(set(planner.exclude_tables) - rows_of.keys())
    if unknown:
        yield f"planner.exclude_tables: {_unknown_table(unknown, rows_of)}"
    for index, pin in enumerate(planner.pins):
        key = f"planner.pins[{index}]"
        if pin.table not in rows_of:
            yield f"{key}.table: {_unknown_table([pin.table], rows_of)}"
            continue
        if pin.table in planner.exclude_tables and pin.tier != "HOME":
            yield f"{key}.tier: {pin.table!r} is in planner.exclude_tables, so it must be HOME (got {pin.tier!r})"
        if pin.table in ruled and pin.tier != "HOME":
            yield f"{key}.tier: {pin.table!r} is not sharded {ROW_WISE}, so it must be HOME (got {pin.tier!r})"
        rows = rows_of[pin.table]
        outside = [row for row in pin.rows or () if not 0 <= row < rows]
        if outside:
            yield f"{key}.rows: rows of table {pin.table!r} are 0 to {rows - 1} (got {_listed(outside)})"


def _unknown_table(unknown: list[str], known: Mapping[str, int]) -> str:
    close = difflib.get_close_matches(unknown[0], known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; known tables: {_listed(known)}"
    return f"no table in tables is named {_listed(unknown)}{hint}"


def _listed(values: Iterable[object]) -> str:
    shown = [repr(value) for value in values]
    more = len(shown) - _MAX_NAMED
    return ", ".join(shown[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _memory_faults(config: Config) -> Iterator[str]:
    from flexd.sketch.coaccess import MIN_BYTES as MIN_COACCESS_BYTES
    from flexd.sketch.sketch_set import choose

    sketch = config.sketch
    try:
        choose(config.keyspace().tables, sketch.memory_bytes, sketch.max_hot_rows)
    except SketchError as error:
        yield f"sketch.memory_bytes: {error}"
    if 0 < sketch.coaccess_memory_bytes < MIN_COACCESS_BYTES:
        yield f"sketch.coaccess_memory_bytes: 0, or at least {MIN_COACCESS_BYTES} (got {sketch.coaccess_memory_bytes})"


def _topology_faults(config: Config) -> Iterator[str]:
    try:
        config.cluster()
    except TopologyError as error:
        yield f"topology.{'preset' if config.topology.file is None else 'file'}: {error}"


def _port_faults(config: Config) -> Iterator[str]:
    server, control = config.server, config.control
    listeners = [("control.listen_port", control.listen_host, control.listen_port)]
    if server.unix_socket is None:
        listeners.append(("server.port", server.host, server.port))
    if server.metrics_listen is not None:
        listeners.append(("server.metrics_listen", *split_address(server.metrics_listen)))
    for (key, host, port), (other, other_host, other_port) in combinations(listeners, 2):
        if port == other_port != 0 and (host == other_host or {host, other_host} & {"0.0.0.0", "::"}):
            yield f"{other}: {key} has the same port {port}; give each its own"


def _kafka_faults(config: Config) -> Iterator[str]:
    source = config.stream.source
    if not isinstance(source, KafkaSourceConfig):
        return
    for server in source.bootstrap_servers.split(","):
        try:
            if split_address(server.strip())[1] == 0:
                raise ValueError("the port must be 1 to 65535")
        except ValueError as error:
            yield f"stream.source.bootstrap_servers: {error} (got {server.strip()!r})"
    # The client's package is imported only where its options are checked.
    from kafka import KafkaConsumer

    from flexd.stream.kafka.sink import checked_options

    known = KafkaConsumer.DEFAULT_CONFIG.keys()
    given = [("client_options", name) for name in source.client_options]
    given += [("client_option_files", name) for name in source.client_option_files]
    for section, name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            yield f"stream.source.{section}.{name}: is not an option of the Kafka client{hint}"
    try:
        # Values in files are secrets; only their names are checked.
        names = source.client_option_files.keys() - {"security_protocol", "api_version"}
        checked_options(source.client_options | dict.fromkeys(names, ""))
    except (StreamError, ValueError) as error:
        yield f"stream.source.client_options: {error}"
