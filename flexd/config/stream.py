"""The stream of accesses, its sources, and what is remembered of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from flexd.config.base import Float, Int, Seconds, Section
from flexd.core.errors import ConfigError


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
    client_options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Passed to kafka-python as they are: ``security_protocol``, ``sasl_*``, ``ssl_*`` and others."""
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
    stream over followers merges to the same counters."""
    logarithmic: bool = True
    """Tables too large for exact counters get 3, 4 or 8 bits a row where that fits: right on average, and every row can
    be listed, which plans need. False keeps to count-min: estimates are never too low."""
    late_after_seconds: Annotated[Float, Field(ge=0)] = 60.0
    """Accesses older than the newest event by more than this are shown as late (they count at their own time all the
    same). Ranks and partitions interleave, so a little behind is the rule."""
