"""``stream inspect``: a topic or file that nobody has described, and the configuration that would count it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field

from flexd.cli.options import OutputOption, check_file
from flexd.cli.render import OutputFormat, present
from flexd.core.errors import ConfigError
from flexd.core.model import HIDDEN, FiniteOrNone, Model, Show
from flexd.doctor import Finding

if TYPE_CHECKING:
    from flexd.stream.inspection import EventsSeen
    from flexd.stream.types import RefusedMessages, StreamMessage

stream = typer.Typer(
    help="Look into a stream of messages.\n\nExample: flexd stream inspect clicks --bootstrap-servers broker:9092",
    no_args_is_help=True,
)


class FieldReport(Model):
    """One field of the events.

    Attributes:
        events: that have it.
        length: mean length of its innermost list.
    """

    path: str
    type: str
    events: int
    values: int
    distinct: int
    length: FiniteOrNone = None
    example: str = ""


class StreamReport(Model):
    """A look at a stream.

    Attributes:
        accesses: that the mapping counts in the messages seen.
        lag_seconds: since the newest event.
        config: of a daemon that counts it, as YAML.
    """

    source: str
    messages_seen: int
    format: str
    events: int
    accesses: int
    events_per_second: FiniteOrNone = None
    lag_seconds: Annotated[FiniteOrNone, Show("newest event")] = None
    fields: tuple[FieldReport, ...]
    findings: tuple[Finding, ...]
    config: Annotated[str, HIDDEN]
    messages: Annotated[tuple[str, ...], Show("remedies"), Field(exclude=True)]


@stream.callback()
def _group() -> None:
    """Keep ``inspect`` a command of its own."""


@stream.command()
def inspect(
    what: Annotated[str, typer.Argument(metavar="TOPIC|FILE", help="A topic, or an existing file.")],
    bootstrap_servers: Annotated[
        str | None, typer.Option("--bootstrap-servers", metavar="HOST:PORT", help="Brokers of the topic.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("-c", "--config", metavar="FILE", help="Take brokers and client options from a daemon's file."),
    ] = None,
    kind: Annotated[
        Literal["json", "avro", "protobuf", "arrow"] | None,
        typer.Option("--format", help="Format of the messages. [default: by their first bytes]"),
    ] = None,
    definition: Annotated[
        str | None,
        typer.Option(
            "--definition", help="Avro: schema file, directory of ID.avsc, or registry URL; or descriptor set."
        ),
    ] = None,
    message: Annotated[str | None, typer.Option("--message", help="Full name of the Protobuf message type.")] = None,
    count: Annotated[int, typer.Option("--messages", help="Newest messages to read.", min=1, max=10_000)] = 300,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=1, max=300, help="Deadline of the broker, in seconds.")
    ] = 10.0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.yaml", dir_okay=False, help="Write the configuration here.")
    ] = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Guess format and mapping of a topic or file, and print the configuration that counts it.

    Joins no consumer group. Explains each kind of message that cannot be read.

    Example: flexd stream inspect clicks --bootstrap-servers broker:9092 --out flexd.yaml
    """
    check_file("--out", out)
    source, sample = _sample(what, bootstrap_servers, config, count, timeout, kind)
    report = _report(what, source, sample, {"format": kind, "definition": definition, "message": message})
    if out is not None:
        out.write_text(report.config, encoding="utf-8")
    present(report, output)
    if output is OutputFormat.TABLE and out is None:
        print(f"\nconfiguration:\n{report.config}", end="")


def _sample(
    what: str, servers: str | None, config: Path | None, count: int, timeout: float, kind: str | None
) -> tuple[dict[str, Any], list[StreamMessage | RefusedMessages]]:
    """Return ``stream.source``, and messages of it."""
    from flexd.config.model import load_config
    from flexd.config.sections import KafkaSourceConfig

    if Path(what).is_file():
        from flexd.stream.file_source import FileSource

        file = FileSource(Path(what), is_base64=kind in ("avro", "protobuf"))
        return {"kind": "file", "path": what}, file.poll(0.0)[:count]
    options: dict[str, Any] = {}
    given: dict[str, Any] = {"kind": "kafka", "bootstrap_servers": servers, "topic": what}
    if config is not None:
        source = load_config(config).stream.source
        if not isinstance(source, KafkaSourceConfig):
            raise ConfigError(f"{config}: stream.source is no topic", remedy="give --bootstrap-servers")
        options = dict(source.resolved_client_options())
        unset = source.model_dump(mode="json", exclude_unset=True)
        given = {**unset, **{key: value for key, value in given.items() if value is not None}}
        given.pop("group_id", None)
    if given["bootstrap_servers"] is None:
        raise ConfigError(f"{what}: no such file, and no brokers are given", remedy="give --bootstrap-servers")
    from flexd.stream.kafka.topic_admin import inspect_topic

    found = inspect_topic(given["bootstrap_servers"], what, options, messages=count, timeout_seconds=timeout)
    if not found.partitions:
        raise ConfigError(
            f"topic {what!r} does not exist", remedy="names are exact; list them with your broker's tools"
        )
    return given, list(found.newest)


def _report(
    what: str, source: dict[str, Any], sample: list[StreamMessage | RefusedMessages], given: dict[str, str | None]
) -> StreamReport:
    import yaml

    from flexd import doctor
    from flexd.config.mapping import MappingConfig
    from flexd.config.model import parse_config
    from flexd.stream.formats import make_reader
    from flexd.stream.inspection import guess, guess_format, read_fields
    from flexd.stream.mapping import EventMapping
    from flexd.stream.types import StreamMessage

    given = {**given, "format": given["format"] or guess_format(sample)}
    known = {key: value for key, value in given.items() if value is not None}
    seen = read_fields(sample, make_reader(MappingConfig.model_validate({**known, "table": "all", "rows": "$"})))
    found = guess(seen)
    name = "".join(c if c.isalnum() else "-" for c in Path(what).stem).strip("-") or "job"
    document = {
        "job": name[:64],
        # Names, rows and dim are a guess: they must be the trainer's.
        "tables": [{"name": table, "rows": rows, "dim": 64} for table, rows in found.tables.items()],
        "stream": {"source": source, "mapping": {**known, **found.mapping}},
    }
    config = parse_config(document)
    mapping = config.stream.mapping
    accesses = 0
    findings = [each for each in doctor.messages(config, what, sample) if each.level is not doctor.Level.OK]
    if mapping is not None:
        decoder = EventMapping(mapping, config.stream.max_message_bytes)
        for message in sample:
            if isinstance(message, StreamMessage):
                accesses += _accesses(decoder, message)
    seconds = sorted(found.seconds)
    span = seconds[-1] - seconds[0] if seconds else 0.0
    head = "# Guessed by flexd stream inspect: tables, rows and dim must be the trainer's.\n"
    return StreamReport(
        source=what,
        messages_seen=len(sample),
        format=known["format"],
        events=len(seen.events),
        accesses=accesses,
        events_per_second=len(seen.events) / span if span else None,
        lag_seconds=time.time() - seconds[-1] if seconds else None,
        fields=tuple(_fields(seen)),
        findings=tuple(findings),
        config=head + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=1000),
        messages=tuple(f"{each.check}: {each.remedy}" for each in findings if each.remedy),
    )


def _accesses(decoder: Any, message: StreamMessage) -> int:
    from flexd.core.errors import CodecError

    try:
        decoder.add(message, time.time())
    except CodecError:
        return 0  # among the findings
    return sum(len(batch.rows) for batch in decoder.drain())


def _fields(seen: EventsSeen) -> list[FieldReport]:
    return [
        FieldReport(
            path=each.path,
            type=each.kind,
            events=each.events,
            values=len(each.values),
            distinct=each.distinct,
            length=sum(each.lengths) / len(each.lengths) if each.lengths else None,
            example=str(each.values[0])[:40] if each.values else "",
        )
        for each in seen.fields.values()
        if each.values
    ]
