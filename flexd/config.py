"""The daemon's YAML as pydantic models. An error names the key path, the value and what is allowed."""

from __future__ import annotations

import ipaddress
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from flexd.config_text import describe_faults, overlay_environment, read_yaml_mapping, redacted
from flexd.errors import ConfigError
from flexd.keyspace import DTYPE_BYTES, OPTIMIZERS, KeySpace, TableSpec


def _no_truth_value(value: Any) -> Any:
    """YAML reads yes, no, on and off as truth values, and pydantic would take them for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not a truth value")
    return value


Int = Annotated[int, BeforeValidator(_no_truth_value)]
Float = Annotated[float, BeforeValidator(_no_truth_value)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Seconds = Annotated[Float, Field(gt=0, le=86_400 * 365)]
Port = Annotated[Int, Field(ge=0, le=65_535)]


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a name or address that only this machine can reach."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` -> (host, port). Raises ValueError with what is allowed."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare and bare == host) or not (port.isascii() and port.isdigit()):
        raise ValueError("must be host:port or [IPv6 address]:port")
    if int(port) > 65_535:
        raise ValueError("the port must be 0 to 65535")
    return bare, int(port)


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, hide_input_in_errors=True
    )


class TableConfig(Section):
    """One embedding table. The list must equal the trainer's, in the same order."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    """As in the stream's messages and in the trainer."""
    rows: Annotated[Int, Field(ge=1, le=2**40)]
    """Number of rows; row ids are 0 to rows - 1."""
    dim: Annotated[Int, Field(ge=1, le=65_536)]
    """Numbers in one row."""
    dtype: str = "float32"
    """Of the rows: ``float64``, ``float32``, ``float16`` or ``bfloat16``."""
    optimizer: str = "sgd"
    """``sgd``, ``adagrad``, ``rowwise_adagrad``, ``adam`` or ``rowwise_adam``: how much optimizer state migrates with a
    row."""

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        if value not in DTYPE_BYTES:
            raise ValueError(f"must be one of {', '.join(DTYPE_BYTES)}")
        return value

    @field_validator("optimizer")
    @classmethod
    def _known_optimizer(cls, value: str) -> str:
        if value not in OPTIMIZERS:
            raise ValueError(f"must be one of {', '.join(OPTIMIZERS)}")
        return value


class FileLogSource(Section):
    """Append-only segment files with offsets; needs no broker."""

    kind: Literal["file_log"]
    """Selects this source."""
    path: Path
    """Directory of the log: one sub-directory a partition."""


class KafkaSource(Section):
    """A Kafka topic read in a consumer group."""

    kind: Literal["kafka"]
    """Selects this source."""
    bootstrap_servers: Annotated[str, Field(min_length=1)]
    """``host:port``, several separated by commas."""
    topic: Annotated[str, Field(min_length=1)] = "flexd-accesses"
    """Topic of the accesses."""
    group_id: Annotated[str, Field(min_length=1)] = "flexd"
    """Consumer group."""
    on_position_lost: Literal["earliest", "latest", "fail"] = "earliest"
    """What to do when the broker no longer has the saved position."""
    connect_timeout_seconds: Seconds = 15.0
    """Deadline of the first connection."""
    session_timeout_seconds: Seconds = 10.0
    """Without a heartbeat for so long the broker gives the partitions to others."""
    client: Literal["kafka-python", "confluent"] = "kafka-python"
    """The client library. ``confluent`` (librdkafka, faster) needs ``pip install 'flexd[confluent]'``."""
    client_options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Passed to the client as they are: ``security_protocol``, ``sasl_*``, ``ssl_*`` ... for kafka-python,
    ``security.protocol`` ... for confluent."""
    client_option_files: dict[str, Path] = Field(default_factory=dict)
    """Client options whose text is read from a file, so that no secret stands in the configuration:
    ``{sasl_plain_password: /run/secrets/kafka-password}``. A closing line break is dropped."""

    @field_validator("client_options", mode="before")
    @classmethod
    def _scalar_options(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for option, setting in value.items():
                if not isinstance(setting, str | int | float | bool):
                    raise ValueError(f"option {option!r} must be text, a number or a truth value")
        return value

    @field_validator("client_option_files")
    @classmethod
    def _given_once(cls, value: dict[str, Path], info: ValidationInfo) -> dict[str, Path]:
        twice = sorted(set(value) & set(info.data.get("client_options", {})))
        if twice:
            raise ValueError(f"given in client_options too: {', '.join(twice)}")
        return value

    def resolved_client_options(self) -> dict[str, str | int | float | bool]:
        """``client_options`` with those of ``client_option_files`` read in. Raises ConfigError if one is unreadable."""
        options = dict(self.client_options)
        for option, path in self.client_option_files.items():
            try:
                options[option] = path.read_text(encoding="utf-8").rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"stream.source.client_option_files.{option}: {path} cannot be read: {error}",
                    remedy="mount the secret, readable by the daemon's user",
                ) from error
        return options


class SyntheticSource(Section):
    """Zipf accesses with drift, made in the daemon: for trying flexd without a trainer."""

    kind: Literal["synthetic"]
    """Selects this source."""
    zipf_exponent: Annotated[Float, Field(gt=0, le=4)] = 1.05
    """Skew: the popularity of the k-th row is proportional to k to the power of minus this."""
    accesses_per_second: Annotated[Float, Field(gt=0)] = 1_000_000
    """Over all tables."""
    drift_rows_per_second: Annotated[Float, Field(ge=0)] = 0.0
    """How fast the popular rows move through the table."""
    seed: Int = 0
    """Of the random numbers."""


class TapSource(Section):
    """Counted by the ranks themselves (``flexd.Tap``) and shipped over the control channel: no log, no broker."""

    kind: Literal["tap"]
    """Selects this source. Interval and memory of the counters are arguments of the trainers' ``flexd.Tap``."""


SourceConfig = Annotated[FileLogSource | KafkaSource | SyntheticSource | TapSource, Field(discriminator="kind")]


class DeadLetterConfig(Section):
    """Samples of rejected messages."""

    path: Path | None = None
    """File to keep them in; default: ``dead-letters.jsonl`` in the state directory."""
    max_bytes: Annotated[Int, Field(ge=0)] = 4 * 2**20
    """Size of the file, at most; 0 keeps nothing."""
    max_message_bytes: Annotated[Int, Field(ge=16)] = 512
    """How much of each rejected message is kept."""


class StreamConfig(Section):
    """The stream of accesses."""

    source: SourceConfig
    """Where it comes from."""
    max_message_bytes: Annotated[Int, Field(ge=1024)] = 16 * 2**20
    """A larger message is rejected unread."""
    poll_seconds: Seconds = 0.2
    """How long one read waits for messages."""
    dead_letters: DeadLetterConfig = DeadLetterConfig()
    """Samples of rejected messages."""


class SketchConfig(Section):
    """What is remembered of the stream."""

    memory_bytes: Annotated[Int, Field(ge=2**20)] = 512 * 2**20
    """For all counters together: decides how each table is counted (dense, logarithmic or count-min)."""
    half_life_seconds: Annotated[Float, Field(gt=0)] | None = 3600.0
    """Event-time half-life of an access; null counts for ever."""
    max_hot_rows: Annotated[Int, Field(ge=1)] = 1_000_000
    """Rows listed one by one in the profile, per table."""
    max_future_seconds: Annotated[Float, Field(ge=0)] = 300.0
    """Accesses dated further ahead of the newest event than this are counted as of the newest event."""
    conservative: bool = True
    """Count-min counters that err less; false makes them independent of the order of arrival, so that any split of the
    stream over threads or followers merges to the same counters."""
    logarithmic: bool = True
    """Tables too large for exact counters get 3, 4 or 8 bits a row where that fits: right on average, and every row can
    be listed, which plans need. False keeps to count-min: estimates are never too low, and it can be exported."""
    late_after_seconds: Annotated[Float, Field(ge=0)] = 60.0
    """Accesses older than the newest event by more than this are shown as late (they count at their own time all the
    same). Ranks and partitions interleave, so a little behind is the rule."""
    ingest_threads: Annotated[Int, Field(ge=1, le=64)] = 1
    """Threads that decode and count, each with counters of its own for the partitions dealt to it: ``memory_bytes`` is
    divided among them. A restart may use another number."""


class TopologyConfig(Section):
    """Which cluster: bandwidths and latencies. Nodes and ranks come from the ranks' hellos."""

    preset: str | None = None
    """A preset that ships with flexd (``flexd/topology/presets/``); ``azure-a100-200g`` if no file is given either."""
    file: Path | None = None
    """A topology file."""

    @field_validator("file")
    @classmethod
    def _one_of(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("preset") is not None:
            raise ValueError("give `preset` or `file`, not both")
        return value


class PinConfig(Section):
    """Rows that keep one tier, whether it pays or not."""

    table: Annotated[str, Field(min_length=1, max_length=256)]
    """Name of the table."""
    tier: Literal["HOME", "NODE", "DEVICE"]
    """Where copies live: one, one in every node, one on every rank."""
    rows: Annotated[list[Int], Field(max_length=2**20)] | None = None
    """Row ids; the whole table if left out."""


class PlannerConfig(Section):
    """When and how to plan."""

    interval_seconds: Seconds = 300.0
    """Time between automatic plans."""
    min_spacing_seconds: Annotated[Float, Field(ge=0)] = 1.0
    """Least time between tries to plan that the daemon starts by itself; ``flexd replan`` does not wait for it."""
    horizon_steps: Annotated[Float, Field(gt=0)] = 10_000
    """Steps over which a migration must pay for itself (hysteresis)."""
    min_samples: Annotated[Int, Field(ge=0)] = 10_000
    """No plan is made from fewer accesses than this."""
    min_coverage: Annotated[Float, Field(ge=0, le=1)] = 0.5
    """No plan is made from a profile that explains a smaller share of the accesses."""
    batch_accesses_per_step: Annotated[Float, Field(gt=0)] | None = None
    """Accesses of the whole job per step, used until the ranks report their own."""
    drift_interval_seconds: Seconds = 60.0
    """Time between two looks at how far the accesses have moved since the live plan was made; longer where a look takes
    more than a tenth of it."""
    drift_threshold: Annotated[Float, Field(gt=1)] | None = 1.05
    """A new plan is made when the live placement costs more than this many times what it cost when it was planned,
    in exposed seconds of a step; null plans at intervals only."""
    exchange: Literal["chain", "direct", "direct_no_dedup"] = "chain"
    """What the trainers gave ``EmbeddingCollection(exchange=...)``. A running job cannot change it; each plan says
    whether another would be cheaper."""
    micro_batches: Annotated[Int, Field(ge=1, le=4096)] = 1
    """Forward passes for each optimizer step: rows are looked up in each, replicas synchronised once."""
    comm_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """What the trainers gave ``EmbeddingCollection(comm_dtype=...)``; by default rows travel as they are stored."""
    frozen_tables: list[str] = []
    """Tables that are read only: they cost no backward pass and no synchronisation."""
    exclude_tables: list[str] = []
    """Tables whose rows all stay at HOME."""
    pins: list[PinConfig] = []
    """Rows or tables whose tier is fixed. They take replica slots before all others; a later pin of a row counts."""
    table_budgets: dict[str, Annotated[Int, Field(ge=0)]] = {}
    """Replica slots that the rows of a table may take on any one rank, by table."""


class ControlConfig(Section):
    """The channel between the daemon and the training ranks."""

    secret_file: Path | None = None
    """Shared secret of daemon and ranks (HMAC-SHA256). Without it messages are not authenticated:
    allowed on loopback only."""
    listen_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address that the ranks connect to."""
    listen_port: Port = 29_400
    """Port that the ranks connect to; 0 takes any free one."""
    chunk_rows: Annotated[Int, Field(ge=1, le=2**22)] = 4096
    """Largest chunk the daemon announces."""
    chunk_bytes: Annotated[Int, Field(ge=1)] = 2**20
    """Row values (with optimizer state) that one chunk may move; ranks apply at most one chunk's worth a step."""
    timeout_seconds: Seconds = 15.0
    """Deadline of every wait on the channel."""

    @field_validator("listen_host")
    @classmethod
    def _secret_beyond_loopback(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("secret_file") is None and not is_loopback(value):
            raise ValueError("is reachable from other machines: set control.secret_file, or listen on 127.0.0.1")
        return value


class ServerConfig(Section):
    """The admin API and the metrics page."""

    unix_socket: Path | None = None
    """Serve the API on this socket (mode 0600) instead of TCP."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Loopback address of the API."""
    port: Port = 9464
    """Port of the API; 0 takes any free one."""
    metrics_listen: str | None = None
    """``host:port`` of a second, read-only listener with nothing but ``/metrics``, ``/healthz`` and ``/readyz``, for
    Prometheus and the kubelet. It may bind any address."""

    @field_validator("host")
    @classmethod
    def _loopback_only(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("unix_socket") is None and not is_loopback(value):
            raise ValueError(
                "the admin API binds loopback or server.unix_socket only; server.metrics_listen may bind any address"
            )
        return value

    @field_validator("metrics_listen")
    @classmethod
    def _host_and_port(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value


class StateConfig(Section):
    """What survives a restart."""

    dir: Path = Path("flexd-state")
    """Directory of snapshots and journal; one daemon each."""
    snapshot_interval_seconds: Seconds = 30.0
    """Time between snapshots: what a crash reads again."""
    keep_snapshots: Annotated[Int, Field(ge=1, le=1000)] = 3
    """Older ones are deleted."""


class LogConfig(Section):
    """Log lines on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe lines to write."""
    format: Literal["text", "json"] = "text"
    """``text`` for people, ``json`` one object a line."""


class ScaleOutConfig(Section):
    """Several daemons on one stream: followers count, the leader adds up, plans and talks to the ranks."""

    role: Literal["standalone", "leader", "follower"] = "standalone"
    """``leader`` takes the counts of followers; ``follower`` counts its partitions and plans nothing. All daemons of a
    job have the same ``tables`` and ``sketch`` sections; those that read the stream share one consumer group."""
    secret_file: Path | None = None
    """Shared secret of leader and followers (HMAC-SHA256). Without it they do not authenticate each other: allowed on
    loopback only."""
    leader: Annotated[str | None, Field(validate_default=True)] = None
    """Follower: ``host:port`` of the leader's listener."""
    listen_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Leader: address that the followers connect to."""
    listen_port: Port = 29_500
    """Leader: port that the followers connect to; 0 takes any free one."""
    consume: bool = True
    """Leader: read partitions of the stream too, as one more member of the group; its counters then take twice
    their memory."""
    name: Name | None = None
    """Follower: its name in status and metrics, unique in the job; default: the host's name."""
    push_interval_seconds: Seconds = 2.0
    """Follower: time between two deltas, which is how far the leader's counters are behind."""
    max_unacknowledged_messages: Annotated[Int, Field(ge=1)] = 1_000_000
    """Follower: read beside a delta that the leader has not answered; beyond this reading stops until it does."""
    max_unacknowledged_seconds: Seconds = 60.0
    """Follower: reading stops when a delta has had no answer for so long."""
    settle_seconds: Seconds = 5.0
    """Follower: how long a rebalance or a stop waits for the leader to take what was counted."""
    silent_after_seconds: Seconds = 30.0
    """Leader: a follower that has not pushed for so long is reported."""

    @field_validator("leader")
    @classmethod
    def _leader_of_a_follower(cls, value: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("role") != "follower":
            return value
        if value is None:
            raise ValueError("a follower needs the address of its leader, host:port")
        host, _ = split_address(value)
        if info.data.get("secret_file") is None and not is_loopback(host):
            raise ValueError("is on another machine: set scale_out.secret_file")
        return value

    @field_validator("listen_host")
    @classmethod
    def _secret_beyond_loopback(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("role") == "leader" and info.data.get("secret_file") is None and not is_loopback(value):
            raise ValueError("is reachable from other machines: set scale_out.secret_file, or listen on 127.0.0.1")
        return value


class Config(Section):
    """The whole file."""

    job: Name
    """Name of the training job; daemon and ranks must agree."""
    tables: Annotated[list[TableConfig], Field(min_length=1)]
    """The embedding tables, as the trainer has them."""
    stream: StreamConfig
    """The stream of accesses."""
    sketch: SketchConfig = SketchConfig()
    """What is remembered of it."""
    topology: TopologyConfig = TopologyConfig()
    """Which cluster prices the plans."""
    planner: PlannerConfig = PlannerConfig()
    """When and how to plan."""
    control: ControlConfig = ControlConfig()
    """The channel to the ranks."""
    server: ServerConfig = ServerConfig()
    """Admin API and metrics."""
    scale_out: ScaleOutConfig = ScaleOutConfig()
    """Several daemons on one stream."""
    state: StateConfig = StateConfig()
    """What survives a restart."""
    log: LogConfig = LogConfig()
    """Log lines."""
    shutdown_seconds: Annotated[Float, Field(gt=0, le=300)] = 20.0
    """SIGTERM to exit, at most."""

    @field_validator("tables")
    @classmethod
    def _unique_tables(cls, value: list[TableConfig]) -> list[TableConfig]:
        twice = sorted(name for name, times in Counter(table.name for table in value).items() if times > 1)
        if twice:
            raise ValueError(f"each table needs its own name; named twice: {', '.join(twice)}")
        return value

    @field_validator("scale_out")
    @classmethod
    def _followers_read_a_log(cls, value: ScaleOutConfig, info: ValidationInfo) -> ScaleOutConfig:
        stream = info.data.get("stream")
        if value.role != "standalone" and isinstance(stream, StreamConfig) and stream.source.kind == "tap":
            raise ValueError("ranks send what they tap to the one daemon they know: role must be standalone with it")
        return value

    def keyspace(self) -> KeySpace:
        return KeySpace([TableSpec(t.name, t.rows, t.dim, t.dtype, t.optimizer) for t in self.tables])

    def document(self) -> dict[str, Any]:
        """The effective configuration as plain JSON values, secrets left out."""
        shown: dict[str, Any] = redacted(self.model_dump(mode="json"))
        return shown


def load_config(path: Path, environ: Mapping[str, str] = os.environ) -> Config:
    """Reads a YAML file, lays ``FLEXD__A__B=value`` over it, and checks it.

    Raises:
        ConfigError: the file cannot be read, is no YAML mapping, or a value is not allowed; the text lists every
            fault as ``key.path: what is allowed (got value)``.
    """
    data, variables = overlay_environment(read_yaml_mapping(path), environ)
    return parse_config(data, origin=str(path), variables=variables)


def parse_config(data: Mapping[str, Any], origin: str = "config", variables: Mapping[str, str] | None = None) -> Config:
    """Checks an already parsed mapping; ``variables`` names the environment variable that set a key path.

    Raises:
        ConfigError: as ``load_config``.
    """
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        faults = describe_faults(error, Config, variables or {})
        raise ConfigError("\n".join(f"{origin}: {line}" for line in faults)) from None
