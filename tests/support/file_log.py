"""Writing and reading file logs."""

from __future__ import annotations

from pathlib import Path

from flexd.stream.file_log.log import FileLogSink, FileLogSource


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
