"""The sections of the configuration: stream and counters, planner and topology, API and control channel."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from zoneinfo import ZoneInfo

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from flexd.config.base import (
    Float,
    Int,
    Name,
    Port,
    Seconds,
    Section,
    UniqueNames,
    is_loopback,
    needs_key,
    split_address,
)
from flexd.config.mapping import MappingConfig
from flexd.core.errors import ConfigError


class FileLogSourceConfig(Section):
    """Append-only segment files with offsets; needs no broker."""

    kind: Literal["file_log"]
    """Selects this source."""
    path: Path
    """Directory of the log: one sub-directory a partition."""


class KafkaSourceConfig(Section):
    """A Kafka topic read in a consumer group."""

    kind: Literal["kafka"]
    """Selects this source."""
    bootstrap_servers: Annotated[str, Field(min_length=1)]
    """Brokers as ``host:port``, separated by commas."""
    topic: Annotated[str, Field(min_length=1)] = "flexd-accesses"
    """Topic of the accesses."""
    group_id: Annotated[str, Field(min_length=1)] = ""
    """Consumer group; without one ``flexd-JOB``: two jobs in one group would count half of the messages each."""
    share: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Share of the topic's partitions to read, for a stream that is too wide for one daemon: at least one, always the
    same ones, and counts are scaled to the whole stream. Each partition must hold messages of every rank, as
    ``flexd.Publisher`` writes them. Below 1 the touches of nodes are estimated and not counted, because a step's
    messages lie in several partitions. After a change all counters start empty."""
    connect_timeout_seconds: Seconds = 15.0
    """Deadline of the first connection."""
    session_timeout_seconds: Seconds = 10.0
    """Time without a heartbeat after which the broker gives the partitions to other members."""
    client_options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Passed to kafka-python as they are: ``security_protocol``, ``sasl_*``, ``ssl_*`` and others."""
    client_option_files: dict[str, Path] = Field(default_factory=dict)
    """Client options whose text is read from a file, so that the configuration has no secrets:
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
        """Return ``client_options`` and the contents of ``client_option_files``. Raises ConfigError if one is
        unreadable."""
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


class FileSourceConfig(Section):
    """One file of events, for ``advise``, ``simulate`` and replays; ``stream.mapping`` says what they hold."""

    kind: Literal["file"]
    """Selects this source."""
    path: Path
    """A Parquet file, an Arrow file or stream, or text with an event in each line (JSON, or base64 of the others)."""


class SyntheticSourceConfig(Section):
    """Zipf accesses with drift, generated in the daemon, to try flexd without a trainer."""

    kind: Literal["synthetic"]
    """Selects this source."""
    zipf_exponent: Annotated[Float, Field(gt=0, le=4)] = 1.05
    """Skew: the popularity of the k-th row is proportional to k to the power of minus this."""
    accesses_per_second: Annotated[Float, Field(gt=0)] = 1_000_000
    """Rate over all tables."""
    drift_rows_per_second: Annotated[Float, Field(ge=0)] = 0.0
    """Speed at which the popular rows move through the table."""


class TapSourceConfig(Section):
    """Counts of the ranks (``flexd.Tap``), sent over the control channel: no log, no broker."""

    kind: Literal["tap"]
    """Selects this source. Interval and memory of the counters are arguments of the trainers' ``flexd.Tap``."""


SourceConfig = Annotated[
    FileLogSourceConfig | KafkaSourceConfig | FileSourceConfig | SyntheticSourceConfig | TapSourceConfig,
    Field(discriminator="kind"),
]


class StreamConfig(Section):
    """The stream of accesses."""

    source: SourceConfig
    """Source of the stream."""
    mapping: MappingConfig | None = None
    """Which fields of a team's own events are tables, rows and ids; without it messages have flexd's own columns."""

    @field_validator("mapping")
    @classmethod
    def _messages_to_map(cls, value: MappingConfig | None, info: ValidationInfo) -> MappingConfig | None:
        kind = getattr(info.data.get("source"), "kind", None)
        if value is not None and kind in ("synthetic", "tap"):
            raise ValueError(f"a source of kind {kind} has no messages to map: remove it")
        return value

    max_message_bytes: Annotated[Int, Field(ge=1024)] = 16 * 2**20
    """A larger message is rejected unread."""
    poll_seconds: Seconds = 0.2
    """Longest wait of one read for messages."""
    dead_letter_bytes: Annotated[Int, Field(ge=0)] = 4 * 2**20
    """Largest size of the file with samples of rejected messages, ``dead-letters.jsonl`` in the state directory; 0
    keeps none."""


class SketchConfig(Section):
    """Counters of accesses."""

    memory_bytes: Annotated[Int, Field(ge=2**20)] = 512 * 2**20
    """Memory of all counters together; it decides the kind of each table's counter (dense, logarithmic or
    count-min). The touches that are counted from a log take up to an eighth of it besides."""
    half_life_seconds: Annotated[Float, Field(ge=1e-3, allow_inf_nan=False)] | None = 3600.0
    """Event-time half-life of an access; null disables decay."""
    max_hot_rows: Annotated[Int, Field(ge=1)] = 1_000_000
    """Rows listed one by one in the profile, per table."""
    max_future_seconds: Annotated[Float, Field(ge=0)] = 300.0
    """Accesses with an event time further ahead of their arrival are counted at their arrival (the broker's time where
    the topic has LogAppendTime, else the daemon's). So wrong or hostile clocks reduce the weight of other accesses by
    the decay over this time at most."""
    coaccess_memory_bytes: Annotated[Int, Field(ge=0)] = 0
    """Memory of a sample of rows that occur together, from which plans learn which rows and samples belong in which
    node: 0 (none), or at least 65536. It needs messages with ``sequence_lengths``."""


class TopologyConfig(Section):
    """Bandwidths and latencies of the cluster. The numbers of nodes and ranks come from the ranks' hellos."""

    preset: str | None = None
    """A preset that ships with flexd (``flexd/topology/presets/``); ``azure-a100-200g`` if no file is given either."""
    file: Path | None = None
    """A topology file, as ``flexd probe`` writes it."""

    @field_validator("file")
    @classmethod
    def _one_of(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("preset") is not None:
            raise ValueError("give `preset` or `file`, not both")
        return value


class PinConfig(Section):
    """Rows with a fixed tier, whether it pays or not."""

    table: Annotated[str, Field(min_length=1, max_length=256)]
    """Name of the table."""
    tier: Literal["HOME", "NODE", "DEVICE"]
    """Tier of the rows: ``HOME`` (no further copy), ``NODE`` (a copy in every node), ``DEVICE`` (a copy on every
    rank)."""
    rows: Annotated[list[Int], Field(max_length=2**20)] | None = None
    """Row ids; default: the whole table."""


Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS = get_args(Day)


def _clock_time(value: Any) -> Any:
    """Convert minutes of the day to text: YAML reads 22:00 without quotes as a number of base 60."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 24 * 60:
        return f"{value // 60:02d}:{value % 60:02d}"
    return value


ClockTime = Annotated[str, BeforeValidator(_clock_time), Field(pattern=r"^(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)$")]


class WindowConfig(Section):
    """A period of some days of the week. Automatic migrations start only inside an ``allow`` window, if there is one,
    and never inside a ``forbid`` window. A migration that runs when a window ends continues. Requests of users are not
    restricted."""

    kind: Literal["allow", "forbid"] = "allow"
    """Automatic migrations are allowed or forbidden inside the window."""
    days: Annotated[list[Day], Field(min_length=1)] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
    """Days on which the window begins; default: every day."""
    start: ClockTime
    """Begin of the window, ``HH:MM`` in the time zone."""
    end: ClockTime
    """End of the window, ``HH:MM``, exclusive; ``24:00`` is midnight. An end before the start is on the next day."""
    time_zone: Annotated[str, Field(validate_default=True)] = "UTC"
    """IANA name, such as ``Europe/Berlin``. When clocks change, a skipped hour is in no window, and a repeated hour is
    in its window both times."""

    @field_validator("end")
    @classmethod
    def _has_a_length(cls, value: str, info: ValidationInfo) -> str:
        if value == info.data.get("start"):
            raise ValueError("equals the start; a whole day is 00:00 to 24:00")
        return value

    @field_validator("time_zone")
    @classmethod
    def _known_zone(cls, value: str) -> str:
        try:
            ZoneInfo(value)
        except (KeyError, ValueError, OSError) as error:
            raise ValueError("is not an IANA time zone of this machine (is the tzdata package installed?)") from error
        return value

    def contains(self, unix_seconds: float) -> bool:
        """Return whether the time is inside; the end is not."""
        local = datetime.fromtimestamp(unix_seconds, ZoneInfo(self.time_zone))
        now, today = f"{local:%H:%M}", local.weekday()
        begins_today, began_yesterday = DAYS[today] in self.days, DAYS[today - 1] in self.days
        if self.start < self.end:
            return begins_today and self.start <= now < self.end
        return (begins_today and self.start <= now) or (began_yesterday and now < self.end)


class MinSavingConfig(Section):
    """The smallest predicted saving of a step for which rows are moved; both bounds count. A plan below it is withheld:
    it is counted and reported, and nothing moves. Pins, excluded tables and replica slots that the live placement does
    not keep to are enforced in any case."""

    seconds: Annotated[Float, Field(ge=0)] = 1e-5
    """Exposed seconds per step. The default is about the latency of one collective: prices are not known more
    exactly."""
    share: Annotated[Float, Field(ge=0, lt=1)] = 0.002
    """Share of the measured step, as far as that is known. The default is what 10,000 steps can show, whose wall time
    has a standard deviation of 5 %, at two standard errors of the difference between two halves of them."""


class PlanGatesConfig(Section):
    """Conditions on a profile and a plan before rows are moved."""

    min_saving: MinSavingConfig = MinSavingConfig()
    """The smallest saving of a step for which rows are moved."""
    min_samples: Annotated[Int, Field(ge=0)] = 10_000
    """No plan is made from fewer accesses than this."""
    min_coverage: Annotated[Float, Field(ge=0, le=1)] = 0.5
    """No plan is made from a profile that explains a smaller share of the accesses."""
    max_lag_messages: Annotated[Int, Field(ge=0)] = 1_000_000
    """No plan is made while more messages of the stream than this are not read yet."""


class PlannerConfig(PlanGatesConfig):
    """Triggers, gates and options of planning."""

    auto: bool = True
    """Carry out automatic plans. With false they are only proposed: ``flexd describe plan latest`` shows a
    proposal, ``flexd apply PLAN_ID`` carries it out."""
    maintenance: Annotated[list[WindowConfig], Field(max_length=64)] = []
    """Windows in which automatic migrations may start; without any they may always start."""
    interval_seconds: Seconds = 300.0
    """Time between automatic plans."""
    min_spacing_seconds: Annotated[Float, Field(ge=0)] = 1.0
    """Least time between two attempts of automatic planning; it does not delay ``flexd replan``."""
    horizon_steps: Annotated[Float, Field(gt=0)] = 10_000
    """Steps over which a migration must pay for itself (hysteresis)."""
    batch_accesses_per_step: Annotated[Float, Field(gt=0)] | None = None
    """Accesses of the whole job per step, used until the ranks report their own."""
    drift_interval_seconds: Seconds = 60.0
    """Time between two measurements of drift (how much more the live placement costs than a plan made now); longer
    where a measurement takes more than 0.3 % of it."""
    drift_threshold: Annotated[Float, Field(gt=1)] | None = 1.01
    """A new plan is made when the exposed seconds of a step at the live placement exceed those of the plan that would
    be made now by this factor, and that plan saves at least ``planner.min_saving``; null plans at intervals only."""
    rehomed_slots_share: Annotated[Float, Field(ge=0, le=1)] = 0.0
    """Share of each rank's replica slots for rows that live in the node whose samples use them most, instead of in that
    of their home; copies have the others. It wins where a loader deals samples to nodes
    (``flexd.affinity.NodeSampler``), and needs ``sketch.coaccess_memory_bytes``. With 0 no row moves, and those that
    have moved come home."""
    exclude_tables: list[str] = []
    """Tables whose rows all stay at HOME."""
    verify_budget_steps: Annotated[Int, Field(ge=0)] = 2_000
    """Training steps after which the measurement of an executed plan ends, its migrations included. Every plan is
    measured in blocks of steps with and without its copies, in random order: one that is not shown to win is rolled
    back, one that takes copies back only if that is shown to lose. Plans with ``planner.pins`` are not measured; with
    0, none."""
    pins: list[PinConfig] = []
    """Rows or tables with a fixed tier. They get replica slots before all others; the last pin of a row counts."""

    @field_validator("verify_budget_steps")
    @classmethod
    def _allows_a_verdict(cls, value: int) -> int:
        if 0 < value < 256:  # 16 blocks of 16 steps
            raise ValueError("is below 256 steps: no difference could be significant; 0 switches it off")
        return value


ApiScope = Literal["read", "admin"]


class TokenConfig(Section):
    """One bearer token of the admin API."""

    name: Name
    """Name of the user: shown in the log and in the history with every request."""
    scope: ApiScope = "read"
    """``read`` allows queries, ``admin`` also changes."""
    file: Path
    """File with the token (16 bytes or more), or ``sha256:`` and the 64 hex digits of its digest; of two lines both are
    accepted. It is read again when it changes."""


class TlsConfig(Section):
    """TLS of the admin API. The files are read again when they change."""

    cert_file: Path | None = None
    """Certificate chain, PEM. Without it the API is served without TLS, which only loopback allows."""
    key_file: Annotated[
        Path | None,
        needs_key("cert_file", "server.tls.cert_file and server.tls.key_file go together: set both or none", both=True),
        Field(validate_default=True),
    ] = None
    """Private key of the certificate, PEM, without a passphrase."""
    client_ca_file: Annotated[
        Path | None,
        needs_key("cert_file", "certificates of clients need TLS: set server.tls.cert_file and key_file"),
    ] = None
    """CAs of client certificates. Clients must present one; with ``server.tokens`` a token is accepted instead."""
    clients: Annotated[
        dict[str, ApiScope],
        Field(max_length=1024),
        needs_key("client_ca_file", "certificates of clients are not verified: set server.tls.client_ca_file"),
    ] = {}
    """Scope of a client by the common name of its certificate. A name that is not listed has no access."""


class ServerConfig(Section):
    """The admin API and the metrics page."""

    unix_socket: Path | None = None
    """Serve the API on this socket (mode 0600) instead of TCP."""
    tokens: Annotated[list[TokenConfig], Field(max_length=256), UniqueNames] = []
    """Bearer tokens. If there are any, ``/v1`` and ``/metrics`` of the API need one, also on loopback and the
    socket."""
    tls: TlsConfig = TlsConfig()
    """TLS, and certificates of clients."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address of the API. Beyond loopback only with ``server.tls``, and ``server.tokens`` or ``server.tls.clients``."""
    port: Port = 9464
    """Port of the API; 0 takes any free one."""
    metrics_listen: str | None = None
    """``host:port`` of a second, read-only listener with nothing but ``/metrics``, ``/healthz`` and ``/readyz``, for
    Prometheus and the kubelet. It may bind any address."""

    @field_validator("tls")
    @classmethod
    def _tls_is_for_tcp(cls, value: TlsConfig, info: ValidationInfo) -> TlsConfig:
        if value.cert_file is not None and info.data.get("unix_socket") is not None:
            raise ValueError("is not used on server.unix_socket: remove one of them")
        return value

    @field_validator("host")
    @classmethod
    def _nothing_plain_beyond_loopback(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("unix_socket") is not None or is_loopback(value):
            return value
        tls = info.data.get("tls")
        if tls is None or tls.cert_file is None:
            raise ValueError("is reachable from other machines: set server.tls, or listen on 127.0.0.1")
        if not info.data.get("tokens") and not tls.clients:
            raise ValueError("is reachable from other machines: set server.tokens or server.tls.clients")
        return value

    @field_validator("metrics_listen")
    @classmethod
    def _host_and_port(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value


class ThrottleConfig(Section):
    """Limits on the speed of migrations. Limits set with ``flexd throttle`` replace them until this section changes. A
    change takes effect at the next chunk of a running migration."""

    bytes_per_step: Annotated[Int, Field(ge=1)] | None = None
    """Row values and optimizer state that may be copied at one step boundary, on every rank; null leaves it to the
    ranks (``max_migration_bytes_per_step``). A single larger row is copied by itself."""
    bytes_per_second: Annotated[Int, Field(ge=1)] | None = None
    """Row values and optimizer state that may be copied per second in the long run, on every rank; a burst may use up
    one second's bytes."""


_ALL_OF_CONTROL_TLS = needs_key(
    "cert_file", "control.tls.cert_file, control.tls.key_file and control.tls.ca_file go together: set all or none",
    both=True,
)  # fmt: skip


class ControlTlsConfig(Section):
    """TLS 1.3 of the control channel: daemon and ranks show each other a certificate. The files are read again when
    they change, for new connections."""

    cert_file: Path | None = None
    """The daemon's certificate chain, PEM, for the name or address by which the ranks reach it. Without it the channel
    has no TLS."""
    key_file: Annotated[Path | None, _ALL_OF_CONTROL_TLS, Field(validate_default=True)] = None
    """Private key of the certificate, PEM, without a passphrase."""
    ca_file: Annotated[Path | None, _ALL_OF_CONTROL_TLS, Field(validate_default=True)] = None
    """CA of the ranks' certificates, PEM. Give each job its own: any holder of a certificate of it may be a rank."""


class ControlConfig(Section):
    """The channel between the daemon and the training ranks."""

    secret_file: Path | None = None
    """Shared secret of daemon and ranks (HMAC-SHA256), which both ends of a connection prove before anything else is
    read. Only loopback, or ``control.tls``, allows to go without."""
    tls: ControlTlsConfig = ControlTlsConfig()
    """Certificates of both ends, beside the secret or in its place. Without TLS the messages are authenticated but not
    encrypted."""
    listen_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address that the ranks connect to."""
    listen_port: Port = 29_400
    """Port that the ranks connect to; 0 takes any free one."""
    chunk_rows: Annotated[Int, Field(ge=1, le=2**20)] = 4096
    """Largest number of rows in a chunk."""
    chunk_bytes: Annotated[Int, Field(ge=1)] = 2**20
    """Row values, with optimizer state, that one chunk may move; ranks apply at most this many bytes per step."""
    throttle: ThrottleConfig = ThrottleConfig()
    """Limits on the speed of migrations."""
    timeout_seconds: Seconds = 15.0
    """Deadline of every operation on the channel."""

    @field_validator("listen_host")
    @classmethod
    def _secret_beyond_loopback(cls, value: str, info: ValidationInfo) -> str:
        tls = info.data.get("tls")
        has_tls = tls is not None and tls.cert_file is not None
        if info.data.get("secret_file") is None and not has_tls and not is_loopback(value):
            raise ValueError(
                "is reachable from other machines: set control.secret_file or control.tls, or listen on 127.0.0.1"
            )
        return value
