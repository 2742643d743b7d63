"""``produce``: send a trace to the stream."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexd.cli.blocks import Facts
from flexd.cli.exit_codes import ExitCode, NotDeliveredError
from flexd.cli.interactive import DryRunOption, YesOption, confirm
from flexd.cli.options import OutputOption
from flexd.cli.view import OutputFormat, emit
from flexd.core import units
from flexd.core.errors import ConfigError, StreamError

if TYPE_CHECKING:
    from flexd.config.model import Config
    from flexd.stream.replay import Pace
    from flexd.stream.trace import Trace
    from flexd.stream.types import Sink

DEFAULT_TOPIC = "flexd-accesses"
PARTITION = "produce"
CONNECT_SECONDS = 15.0
MESSAGE_ACCESSES = 4096
"""Accesses in one message."""
MAX_FUTURE_SECONDS = 300.0
"""Default of ``sketch.max_future_seconds``, for targets that come without the daemon's configuration."""


class Anchor(StrEnum):
    """The event of the trace that is dated now."""

    START = "start"
    END = "end"


def produce(
    trace: Annotated[Path, typer.Argument(metavar="FILE.npz", exists=True, dir_okay=False, help="Events to send.")],
    log: Annotated[
        Path | None, typer.Option("--log", metavar="DIR", help=f"Send to this file log, partition {PARTITION!r}.")
    ] = None,
    kafka: Annotated[
        str | None, typer.Option("--kafka", metavar="HOST:PORT", help="Send to this Kafka broker.")
    ] = None,
    topic: Annotated[str, typer.Option("--topic", metavar="NAME", help="Topic of the Kafka broker.")] = DEFAULT_TOPIC,
    config: Annotated[
        Path | None, typer.Option("-c", "--config", metavar="FILE", help="Send to the source of this daemon's YAML.")
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option("--table", metavar="OLD=NEW", help="Rename a table of the trace; repeat for several tables."),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(
            "--speed",
            metavar="N",
            min=1e-6,
            max=1e12,
            help="Replay the trace by its own times, N times as fast; event times are compressed by N.",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="N", min=0.001, help="Send N accesses a second. [default: all at once]"),
    ] = None,
    now: Annotated[
        Anchor | None,
        typer.Option(
            "--now", help="Shift event times: the trace starts or ends now. [default: start with --speed, else end]"
        ),
    ] = None,
    as_dated: Annotated[
        bool, typer.Option("--as-dated", help="Keep the event times of the trace (with --speed: only pace by them).")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=0.1, max=3600, help="Limit for sending one message.")
    ] = 30.0,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Send a trace to a file log or a Kafka topic.

    It sends the events as a trainer's publisher does. Control-C ends it.

    Exit status 4 if the broker cannot be reached, or did not deliver messages that it accepted.

    Example: flexd produce events.npz -c configs/laptop.yaml --speed 600 --now start --yes
    """
    if sum(given is not None for given in (log, kafka, config)) != 1:
        raise ConfigError("no target, or several", remedy="give one of --log, --kafka and --config")
    if speed is not None and rate is not None:
        raise ConfigError("--speed and --rate both set the pace", remedy="give one of them")
    if as_dated and now is not None:
        raise ConfigError("--now shifts the event times that --as-dated keeps", remedy="give one of them")
    from flexd.stream import replay
    from flexd.stream.trace import load_trace

    events = replay.rename_tables(load_trace(trace), _renames(table or ()))
    target = _Target(log=log) if log is not None else _Target(kafka=kafka or "", topic=topic)
    max_future_seconds = MAX_FUTURE_SECONDS
    if config is not None:
        from flexd.config.tables_file import load_with_known_tables

        checked = load_with_known_tables(config)
        _check_tables(events, checked, trace)
        target = _of_config(config, checked)
        max_future_seconds = checked.sketch.max_future_seconds
    compression = 1.0 if as_dated or speed is None else speed
    messages = -(-len(events) // MESSAGE_ACCESSES)
    span = float(events.seconds[-1] - events.seconds[0])
    duration = len(events) / rate if rate is not None else span / speed if speed is not None else None
    what = f"{units.count(len(events))} accesses in {units.plural(messages, 'message')} to {target}"
    if duration is not None:
        what += f", in about {units.age(duration)}"
    anchor = now or (Anchor.END if speed is None else Anchor.START)
    dated = events if as_dated else replay.move_times(events, anchor.value, time.time(), compression)
    pace: Pace | None = None
    if rate is not None:
        pace = replay.constant_rate(rate)
    elif speed is not None:
        pace = replay.trace_times(dated, speed if as_dated else 1.0)
    _warn_of_future(dated, pace, max_future_seconds)
    if dry_run:
        facts = {"accesses": len(events), "messages": messages, "seconds": duration, "target": str(target)}
        emit({**facts, "sent": False}, [Facts("", (("would send", what),))], output)
        return
    confirm(f"{what}. Send?", yes)
    if not as_dated:
        # Again: the confirmation may have taken any time.
        events = replay.move_times(events, anchor.value, time.time(), compression)
    sink = target.open(timeout)
    progress = _Progress(len(events))
    try:
        sent = replay.replay(
            replay.trace_batches(events, MESSAGE_ACCESSES, ranks=1),
            sink,
            pace=pace,
            timeout_seconds=timeout,
            progress=progress,
        )
    except StreamError as error:
        sent_part = (
            f"{units.count(progress.sent)} of {units.count(len(events))} accesses were sent, the last may be lost"
        )
        raise NotDeliveredError(
            f"{error.message} ({sent_part if progress.sent else 'nothing was sent'})", remedy=target.remedy
        ) from error
    finally:
        sink.close()
    pairs = (
        ("sent", f"{units.count(sent.accesses)} accesses in {units.plural(sent.messages, 'message')}"),
        ("to", str(target)),
        ("payload", units.size(sent.payload_bytes)),
        ("rate", units.rate(sent.accesses / max(sent.seconds, 1e-9), "accesses")),
        ("failed", units.count(sent.failed)),
    )
    emit({**asdict(sent), "target": str(target)}, [Facts("", pairs)], output)
    raise typer.Exit(ExitCode.REFUSED if sent.failed else ExitCode.OK)


@dataclass(frozen=True)
class _Target:
    """A file log's directory, or a topic of a broker."""

    log: Path | None = None
    kafka: str = ""
    topic: str = ""
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"file log {self.log}" if self.log is not None else f"topic {self.topic} at {self.kafka}"

    @property
    def remedy(self) -> str:
        """Advice for a target that accepts nothing."""
        if self.log is not None:
            return "check the directory and the disk"
        return (
            f"check that a broker listens at {self.kafka} and has topic {self.topic} (--kafka, --topic), or wait "
            "longer (--timeout); flexd doctor -c FILE checks the broker of a configuration"
        )

    def open(self, timeout_seconds: float) -> Sink:
        if self.log is not None:
            from flexd.stream.file_log.log import FileLogSink

            return FileLogSink(self.log, PARTITION)
        from flexd.stream.kafka.sink import KafkaSink

        # Below the deadline of a message, so that the error is the client's and not "connecting".
        connecting = min(CONNECT_SECONDS, 0.8 * timeout_seconds)
        return KafkaSink(self.kafka, self.topic, connect_timeout_seconds=connecting, client_options=self.options)


def _of_config(path: Path, config: Config) -> _Target:
    from flexd.config.stream import FileLogSource, KafkaSource

    source = config.stream.source
    if isinstance(source, FileLogSource):
        return _Target(log=source.path)
    if not isinstance(source, KafkaSource):
        raise ConfigError(
            f"{path}: stream.source: a source of kind {source.kind!r} accepts no messages",
            remedy="give --log or --kafka",
        )
    options = source.resolved_client_options()
    from flexd.stream.kafka.options import producer_options

    return _Target(kafka=source.bootstrap_servers, topic=source.topic, options=producer_options(options))


def _renames(pairs: Sequence[str]) -> dict[str, str]:
    """Parse ``OLD=NEW`` arguments. Raises ConfigError if one has another form or repeats an old name."""
    names: dict[str, str] = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not (old and equals and new):
            raise ConfigError(f"--table {pair}: not of the form OLD=NEW", remedy="for example --table item=items")
        if old in names:
            raise ConfigError(f"--table {pair}: table {old!r} is renamed twice", remedy="give one new name a table")
        names[old] = new
    return names


def _warn_of_future(trace: Trace, pace: Pace | None, max_future_seconds: float) -> None:
    """Print a note if the daemon would clamp event times because messages are dated far ahead of their arrival."""
    last = [*range(MESSAGE_ACCESSES, len(trace), MESSAGE_ACCESSES), len(trace)]
    now = time.time()
    ahead = [
        float(trace.seconds[end - 1]) - now - (0.0 if pace is None else pace(float(trace.seconds[end - 1]), end))
        for end in last
    ]
    future = [seconds for seconds in ahead if seconds > max_future_seconds]
    if future:
        print(
            f"note: {units.plural(len(future), 'message')} of {units.count(len(last))} are dated up to "
            f"{units.age(max(future))} after they are sent; the daemon counts accesses that are dated more than "
            f"{max_future_seconds:g} s ahead at their arrival (future_clamped). --speed sends each at its time.",
            file=sys.stderr,
        )


def _check_tables(trace: Trace, config: Config, path: Path) -> None:
    """Raise ConfigError if the daemon would reject tables or rows of the trace."""
    known = {table.name: table.rows for table in config.tables}
    for name, rows in zip(trace.table_names, trace.table_rows, strict=True):
        if name not in known:
            raise ConfigError(
                f"{path}: table {name!r} is not configured",
                remedy=f"rename it: --table {name}=NEW, with NEW one of {', '.join(known)}"[:500],
            )
        if rows > known[name]:
            raise ConfigError(
                f"{path}: table {name!r} has {rows} rows, {known[name]} are configured",
                remedy="raise tables[].rows, or use a trace of this table",
            )


class _Progress:
    """Count the accesses sent, and show them on a line that rewrites itself on a terminal, not in a pipe."""

    def __init__(self, accesses: int) -> None:
        self.sent = 0
        self._accesses = accesses
        self._shown = sys.stderr.isatty()

    def __call__(self, sent: int) -> None:
        self.sent = sent
        if self._shown:
            end = "\n" if sent == self._accesses else ""
            text = f"\r{units.count(sent)} of {units.count(self._accesses)} accesses"
            print(text, end=end, file=sys.stderr, flush=True)
