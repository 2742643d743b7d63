"""Configuration of the stream of accesses and of its counters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from flexd.config.base import Float, Int, Seconds, Section
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
    group_id: Annotated[str, Field(min_length=1)] = "flexd"
    """Consumer group."""
    share: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Share of the topic's partitions to read, for a stream that is too wide for one daemon: at least one, always the
    same ones, and counts are scaled to the whole stream. Each partition must hold messages of every rank, as
    ``flexd.Publisher`` writes them. Below 1 the touches of nodes are estimated and not counted, because a step's
    messages lie in several partitions. After a change all counters start empty."""
    on_position_lost: Literal["earliest", "latest", "fail"] = "earliest"
    """Where to continue when the broker no longer has the saved position; ``fail`` stops the daemon."""
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
    FileLogSourceConfig | KafkaSourceConfig | SyntheticSourceConfig | TapSourceConfig, Field(discriminator="kind")
]


class StreamConfig(Section):
    """The stream of accesses."""

    source: SourceConfig
    """Source of the stream."""
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
