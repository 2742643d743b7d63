"""The access stream: read, rejected, behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from flexd.core.model import ALWAYS, HIDDEN, FiniteOrNone, Model, Show, counter, gauge, with_zeros

if TYPE_CHECKING:
    from flexd.config.model import Config
    from flexd.sketch.ingestor import Ingestor


class StreamStatus(Model):
    """The access stream now; counters run since the daemon started."""

    source: str
    """Kind of the source: ``file_log``, ``kafka``, ``synthetic`` or ``tap``."""
    lag_messages: Annotated[int, ALWAYS] = 0
    """Messages in the stream that are not read yet."""
    read_share: float = 1.0
    """Share of the stream's partitions that are read (``stream.source.share``). Messages and accesses here are those
    read; weights of tables and rows are scaled to the whole stream."""
    messages_per_second: FiniteOrNone = None
    """Rate of the last minute."""
    accesses_per_second: FiniteOrNone = None
    """Rate of the last minute."""
    messages: int = 0
    """Messages read and counted."""
    accesses: int = 0
    """Accesses counted."""
    bytes: Annotated[int, HIDDEN] = 0
    """Payload of the messages read."""
    rejected_messages: dict[str, int] = Field(default_factory=dict)
    """Messages not counted, by reason."""
    rejected_accesses: dict[str, int] = Field(default_factory=dict)
    """Accesses not counted inside good messages, by reason."""
    adjusted_accesses: dict[str, int] = Field(default_factory=dict)
    """Accesses counted by rule: ``late`` (older than the newest event by 60 s, at their own time),
    ``future_clamped`` (dated too far ahead, at their arrival)."""
    messages_lost: dict[str, int] = Field(default_factory=dict)
    """Messages that existed and the source could not deliver, by reason."""
    positions_lost: dict[str, int] = Field(default_factory=dict)
    """Positions that the log no longer had, by reason."""
    dead_letters: int = 0
    """Samples of rejected messages kept."""
    dead_letter_failures: int = 0
    """Samples that could not be written."""
    source_failures: int = 0
    """Failed reads of the source."""
    commit_failures: int = 0
    """Positions that could not be committed."""
    newest_event_unix_seconds: Annotated[FiniteOrNone, Show("newest access")] = None
    """Newest event time seen."""
    least_skew_seconds: FiniteOrNone = None
    """Least event time minus arrival of the accesses of the last ten seconds."""
    most_skew_seconds: FiniteOrNone = None
    """Most of the same; above ``sketch.max_future_seconds`` accesses are counted at their arrival."""
    problem: str | None = None
    """Reason why the source cannot be read now, or no snapshot can be written; null if both can."""
    connected: Annotated[bool, HIDDEN] = True
    """False while the source has a problem."""

    def losses(self) -> str:
        """Return what was lost, in words; empty if nothing was."""
        parts = [
            f"{sum(lost.values())} {what} ({', '.join(f'{reason} {number}' for reason, number in shown)})"
            for what, lost in (("messages", self.messages_lost), ("positions", self.positions_lost))
            if (shown := [(reason, number) for reason, number in lost.items() if number])
        ]
        return ", ".join(parts)

    FAMILIES = (
        counter("flexd_ingest_messages", "Stream messages read and counted.", "messages"),
        counter("flexd_ingest_accesses", "Accesses counted.", "accesses"),
        counter("flexd_ingest_bytes", "Payload bytes of the messages read.", "bytes"),
        counter("flexd_ingest_rejected_messages", "Messages not counted, by reason.", "rejected_messages", ("reason",)),
        counter(
            "flexd_ingest_rejected_accesses", "Accesses not counted inside good messages, by reason.",
            "rejected_accesses", ("reason",),
        ),
        counter(
            "flexd_ingest_adjusted_accesses",
            "Accesses counted by rule: late (at their own time) and future_clamped (at their arrival).",
            "adjusted_accesses", ("rule",),
        ),
        gauge("flexd_ingest_lag_messages", "Messages in the stream not read yet.", "lag_messages"),
        gauge("flexd_ingest_read_share", "Share of the stream's partitions that are read.", "read_share"),
        gauge("flexd_ingest_connected", "0 while the source reports a problem.", "connected"),
        counter(
            "flexd_ingest_lost_messages", "Messages that existed and the source could not deliver, by reason.",
            "messages_lost", ("reason",),
        ),
        counter(
            "flexd_ingest_lost_positions", "Positions that the log no longer had, by reason.", "positions_lost",
            ("reason",),
        ),
        counter("flexd_ingest_source_failures", "Failed reads of the source.", "source_failures"),
        gauge(
            "flexd_ingest_newest_event_time_seconds", "Newest event time seen, Unix time; NaN before the first.",
            "newest_event_unix_seconds",
        ),
        gauge(
            "flexd_ingest_event_time_skew_seconds",
            "Event time minus arrival of the accesses of the last ten seconds: least and most; NaN without any.",
            lambda stream: {"least": stream.least_skew_seconds, "most": stream.most_skew_seconds}, ("bound",),
        ),
    )  # fmt: skip


def stream_status(config: Config, ingestor: Ingestor) -> StreamStatus:
    """Return the stream as the ingest has counted it."""
    from flexd.sketch.ingestor import MESSAGE_REASONS, ROW_REASONS
    from flexd.stream.types import LOSS_REASONS, POSITION_REASONS

    counter, problems, losses = ingestor.counter, ingestor.problems(), ingestor.source.losses()
    accesses = counter.accesses
    return StreamStatus(
        source=config.stream.source.kind,
        lag_messages=ingestor.lag_messages,
        read_share=ingestor.source.read_share,
        messages_per_second=ingestor.rates.messages_per_second,
        accesses_per_second=ingestor.rates.accesses_per_second,
        messages=counter.messages,
        accesses=accesses.accepted,
        bytes=counter.bytes,
        rejected_messages=with_zeros(MESSAGE_REASONS, counter.rejected),
        rejected_accesses={reason: getattr(accesses, reason) for reason in ROW_REASONS},
        adjusted_accesses={"future_clamped": accesses.future_clamped, "late": accesses.late},
        messages_lost=with_zeros(LOSS_REASONS, losses.messages),
        positions_lost=with_zeros(POSITION_REASONS, losses.positions),
        dead_letters=ingestor.dead_letters.written,
        dead_letter_failures=ingestor.dead_letters.failures,
        source_failures=ingestor.failures["stream"],
        commit_failures=ingestor.snapshots.commit_failures,
        newest_event_unix_seconds=ingestor.sketches.newest_event_seconds,
        least_skew_seconds=counter.skew_seconds[0],
        most_skew_seconds=counter.skew_seconds[1],
        problem="; ".join(text for _, text in problems) or None,
        connected=all(part != "stream" for part, _ in problems),
    )
