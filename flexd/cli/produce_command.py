"""``produce``: feeds a trace to the stream."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexd.cli.confirm import DryRunOption, YesOption, confirm
from flexd.cli.exit_codes import ExitCode, NotDeliveredError
from flexd.cli.options import OutputOption
from flexd.cli.view import Facts, OutputFormat, emit
from flexd.core import units
from flexd.core.errors import ConfigError, StreamError

if TYPE_CHECKING:
    from flexd.config.model import Config
    from flexd.stream.trace import Trace
    from flexd.stream.types import Sink

DEFAULT_TOPIC = "flexd-accesses"
PARTITION = "produce"
CONNECT_SECONDS = 15.0


def produce(
    trace: Annotated[Path, typer.Argument(metavar="FILE.npz", exists=True, dir_okay=False, help="Events to send.")],
    log: Annotated[
        Path | None, typer.Option("--log", metavar="DIR", help=f"To this file log, partition {PARTITION!r}.")
    ] = None,
    kafka: Annotated[str | None, typer.Option("--kafka", metavar="HOST:PORT", help="To this Kafka broker.")] = None,
    topic: Annotated[str, typer.Option("--topic", metavar="NAME", help="Of the broker.")] = DEFAULT_TOPIC,
    config: Annotated[
        Path | None, typer.Option("-c", "--config", metavar="FILE", help="To the source of this daemon's YAML.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="N", min=0.001, help="Accesses a second. [default: all at once]")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("-n", "--limit", metavar="N", min=1, help="Send the first N accesses only.")
    ] = None,
    message: Annotated[
        int, typer.Option("--message", metavar="N", min=1, max=1_000_000, help="Accesses in one message.")
    ] = 4096,
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", min=1, max=65_536, help="Source ranks, in turn a message.")
    ] = 1,
    now: Annotated[
        bool, typer.Option("--now/--as-dated", help="Move the events in time so that the last one is now.")
    ] = True,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=0.1, max=3600, help="For one message to be taken.")
    ] = 30.0,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Sends the events of a trace to a file log or a Kafka topic, as a trainer's publisher would. Control-C ends it.

    Exit status 4 if there is no broker, or it took messages and did not deliver them.

    Example: flexd produce events.npz --log flexd-data/accesses --yes
    """
    if sum(given is not None for given in (log, kafka, config)) != 1:
        raise ConfigError("where to?", remedy="give one of --log, --kafka and --config")
    from flexd.stream.replay import Replayed, replay, trace_batches
    from flexd.stream.trace import load_trace

    events = _first(load_trace(trace), limit)
    target = _Target(log=log) if log is not None else _Target(kafka=kafka or "", topic=topic)
    if config is not None:
        from flexd.config.load import load_config

        checked = load_config(config)
        _check_tables(events, checked, trace)
        target = _of_config(config, checked)
    messages = -(-len(events) // message)
    what = f"{units.count(len(events))} accesses in {units.count(messages)} messages to {target}"
    if dry_run:
        facts = {"accesses": len(events), "messages": messages, "target": str(target), "sent": False}
        emit(facts, [Facts("", (("would send", what),))], output)
        return
    confirm(f"{what}. Send?", yes)
    shift = time.time() - float(events.seconds[-1]) if now else 0.0
    sink = target.open(timeout)
    progress = _Progress(len(events))
    try:
        sent: Replayed = replay(
            trace_batches(events, message, ranks, shift), sink, accesses_per_second=rate, patience_seconds=timeout,
            progress=progress,
        )  # fmt: skip
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
        ("sent", f"{units.count(sent.accesses)} accesses in {units.count(sent.messages)} messages"),
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
        """Where nothing is taken."""
        if self.log is not None:
            return "check the directory and the disk"
        return (
            f"is a broker at {self.kafka}, has it topic {self.topic}? --kafka and --topic name others, --timeout waits "
            "longer; flexd doctor -c FILE asks the broker of a configuration"
        )

    def open(self, timeout_seconds: float) -> Sink:
        if self.log is not None:
            from flexd.stream.file_log.log import FileLogSink

            return FileLogSink(self.log, PARTITION)
        from flexd.stream.kafka.sink import KafkaSink

        # Below the deadline of a message, so that this ends with what the client says and not with "connecting".
        connecting = min(CONNECT_SECONDS, 0.8 * timeout_seconds)
        return KafkaSink(self.kafka, self.topic, connect_timeout_seconds=connecting, client_options=self.options)


def _of_config(path: Path, config: Config) -> _Target:
    from flexd.config.stream import FileLogSource, KafkaSource

    source = config.stream.source
    if isinstance(source, FileLogSource):
        return _Target(log=source.path)
    if not isinstance(source, KafkaSource):
        raise ConfigError(
            f"{path}: stream.source: nobody can write to a source of kind {source.kind!r}",
            remedy="give --log or --kafka",
        )
    options = source.resolved_client_options()
    from flexd.stream.kafka.options import for_a_producer

    return _Target(kafka=source.bootstrap_servers, topic=source.topic, options=for_a_producer(options))


def _first(trace: Trace, limit: int | None) -> Trace:
    if limit is None or limit >= len(trace):
        return trace
    user = None if trace.user is None else trace.user[:limit]
    return replace(
        trace, table=trace.table[:limit], row=trace.row[:limit], seconds=trace.seconds[:limit], user=user
    )  # fmt: skip


def _check_tables(trace: Trace, config: Config, path: Path) -> None:
    """Raises ConfigError if the daemon would reject what the trace names."""
    known = {table.name: table.rows for table in config.tables}
    for name, rows in zip(trace.table_names, trace.table_rows, strict=True):
        if name not in known:
            raise ConfigError(f"{path}: table {name!r} is not configured", remedy=f"one of {', '.join(known)}"[:500])
        if rows > known[name]:
            raise ConfigError(
                f"{path}: table {name!r} has {rows} rows, {known[name]} are configured",
                remedy="raise tables[].rows, or make the trace of this table",
            )


class _Progress:
    """Remembers how much was sent; shows it on a line that rewrites itself on a terminal, not in a pipe."""

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
