"""Opening Kafka sources, and reading messages of a source until a condition holds."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexd.config.sections import KafkaSourceConfig
from flexd.stream.file_log.log import FileLogSink, FileLogSource
from flexd.stream.kafka.source import KafkaSource
from flexd.stream.types import StreamMessage


def read_all(source: FileLogSource, rounds: int = 3) -> list[tuple[int, bytes]]:
    """Poll until ``rounds`` polls in a row return nothing; return (offset, payload) of every message."""
    got: list[tuple[int, bytes]] = []
    empty = 0
    while empty < rounds:
        messages = source.poll(0.0)
        empty = 0 if messages else empty + 1
        got += [(m.offset, bytes(m.payload)) for m in messages]
    return got


def source_of(path: Path, **options) -> FileLogSource:
    """Open a source that scans for new partitions on every poll."""
    return FileLogSource(path, discovery_seconds=0.0, **options)


def write(path: Path, payloads: list[bytes], partition: str = "p", **options) -> None:
    """Append messages to a partition and close it."""
    sink = FileLogSink(path, partition, **options)
    for payload in payloads:
        sink.send(payload)
    sink.close()


def segment_files(path: Path) -> list[Path]:
    """Return the segments of partition ``p``."""
    return sorted((path / "p").glob("*.log"))


def kafka_source(address: str, topic: str, group: str, *, job="", limits=None, work=None, **config: Any) -> KafkaSource:
    """Open a source; ``config`` is what the configuration may say besides."""
    settings = KafkaSourceConfig(kind="kafka", bootstrap_servers=address, topic=topic, group_id=group, **config)
    return KafkaSource(settings, job=job, limits=limits, work=work)


def poll_until(
    source: Any, condition: Callable[[list[StreamMessage]], object], seconds: float = 90.0, poll_seconds: float = 0.1
) -> list[StreamMessage]:
    """Poll ``source`` until ``condition`` holds for all messages read so far, and return these.

    Raises:
        AssertionError: ``condition`` is still false after ``seconds``; the text has the source's problem.
    """
    messages: list[StreamMessage] = []
    deadline = time.monotonic() + seconds
    while not condition(messages):
        assert time.monotonic() < deadline, f"{len(messages)} messages; problem: {source.problem}"
        messages += source.poll(poll_seconds)
    return messages
