"""Checks of the stream: it exists, and its newest messages fit the configuration."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from flexd.config.model import Config
from flexd.config.stream import FileLogSourceConfig, KafkaSourceConfig
from flexd.core import units
from flexd.core.errors import CodecError
from flexd.doctor.finding import Finding, fault, ok, skipped, warning

MAX_MESSAGES = 200
SKEW_SECONDS = 60.0
"""An event further ahead of this machine's clock comes from a wrong clock."""


def stream(config: Config, timeout_seconds: float) -> Iterator[Finding]:
    """Check broker, topic and messages, without joining a consumer group or moving a position.

    Raises:
        StreamError: the broker cannot be reached or refuses, or the log cannot be read.
        ConfigError: a client option file cannot be read.
    """
    source = config.stream.source
    if isinstance(source, FileLogSourceConfig):
        name, path = f"file log {source.path}", source.path
        if not path.is_dir():
            yield warning(
                "stream",
                f"{name} does not exist yet",
                "check that stream.source.path is the publishers' directory",
            )
            return
        yield ok("stream", f"{name}: {_partitions(sum(1 for entry in path.iterdir() if entry.is_dir()))}")
        payloads = _first_messages(path)
    elif isinstance(source, KafkaSourceConfig):
        from flexd.stream.kafka.topic_admin import inspect_topic

        found = inspect_topic(
            source.bootstrap_servers,
            source.topic,
            source.resolved_client_options(),
            messages=MAX_MESSAGES,
            timeout_seconds=timeout_seconds,
        )
        yield ok("broker", f"{source.bootstrap_servers} answers")
        if found.partitions == 0:
            yield fault(
                "topic",
                f"{source.topic!r} does not exist",
                "create it, or correct stream.source.topic (names are exact)",
            )
            return
        kept = units.plural(found.messages, "message")
        yield ok("topic", f"{source.topic!r}: {_partitions(found.partitions)}, {kept} kept")
        name, payloads = f"topic {source.topic!r}", found.payloads
    else:
        yield skipped("stream", f"a source of kind {source.kind} has no stream to check")
        return
    yield from messages(config, name, payloads)


def messages(config: Config, name: str, payloads: Sequence[bytes]) -> Iterator[Finding]:
    """Check that tables, rows and times of the sampled messages fit the configuration."""
    if not payloads:
        yield warning("messages", f"{name} has no messages", "start a publisher")
        return
    from flexd.stream.codec import decode

    refused: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    outside: Counter[str] = Counter()
    known = {table.name: table.rows for table in config.tables}
    if not known:
        yield warning(
            "messages", "no tables are known yet: tables and rows of messages are not checked",
            "start the training once, or list its tables in the configuration",
        )  # fmt: skip
        return
    accesses, newest = 0, -np.inf
    for payload in payloads:
        try:
            batches = decode(payload, config.stream.max_message_bytes)
        except CodecError as error:
            refused[error.reason] += 1
            continue
        for batch in batches:
            accesses += len(batch.rows)
            newest = max(newest, batch.event_time_seconds)
            if batch.table not in known:
                unknown[batch.table] += len(batch.rows)
            elif len(batch.rows):
                wrong = int(((batch.rows < 0) | (batch.rows >= known[batch.table])).sum())
                outside[batch.table] += wrong
    looked = f"of {len(payloads)} messages"
    if refused:
        yield fault(
            "messages",
            f"{refused.total()} {looked} cannot be read: {_listed(refused)}",
            "docs/stream.md has the schema",
        )
    if unknown:
        yield fault("messages", f"{looked}: tables that are not configured: {_listed(unknown)}", "list them in tables")
    outside = +outside
    if outside:
        yield fault("messages", f"{looked}: rows beyond tables[].rows: {_listed(outside)}", "raise the tables' rows")
    if not (refused or unknown or outside):
        yield ok("messages", f"{accesses} accesses {looked} fit the configuration")
    if np.isfinite(newest):
        yield from _age(newest)


def _age(newest: float) -> Iterator[Finding]:
    ahead = newest - time.time()
    if ahead > SKEW_SECONDS:
        yield warning(
            "event time",
            f"the newest event is dated {units.age(ahead)} in the future",
            "synchronise the clocks, or send event_time in seconds (not milliseconds)",
        )
    else:
        yield ok("event time", f"the newest event is {units.age(max(0.0, -ahead))} old")


def _first_messages(path: Path) -> tuple[bytes, ...]:
    from flexd.stream.file_log.log import FileLogSource

    with contextlib.closing(FileLogSource(path)) as log:
        return tuple(bytes(message.payload) for message in log.poll(0.2)[:MAX_MESSAGES])


def _partitions(count: int) -> str:
    return units.plural(count, "partition")


def _listed(counts: Counter[str]) -> str:
    """Return the most frequent names with their counts."""
    shown: Sequence[tuple[str, int]] = counts.most_common(5)
    more = len(counts) - len(shown)
    text = ", ".join(f"{name[:80]!r} {count}" for name, count in shown)
    return text + (f" and {more} more" if more > 0 else "")
