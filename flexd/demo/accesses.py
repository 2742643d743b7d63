"""How a demo rank tells the daemon what it looks up: id by id over a log, or counted by a tap."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import flexd
from flexd.stream.types import Sink

TAP_STEPS = 4
"""Between two hand-overs of a tap's counts: the demo's event time jumps through its trace, so intervals are short."""


class Accesses(Protocol):
    """Told of every batch before it is looked up."""

    tap: flexd.Tap | None

    def batch(self, features: Mapping[str, flexd.Jagged], seconds: float) -> None:
        """``seconds``: event time."""

    def close(self) -> int:
        """After the last step: how many accesses the daemon will never see."""


class Published:
    """Every id over a sink."""

    tap: flexd.Tap | None = None

    def __init__(self, sink: Sink, rank: int) -> None:
        self._publisher = flexd.Publisher(sink, source_rank=rank)

    def batch(self, features: Mapping[str, flexd.Jagged], seconds: float) -> None:
        for name, jagged in features.items():
            self._publisher.publish(name, jagged.values, jagged.lengths, event_time_seconds=seconds)

    def close(self) -> int:
        self._publisher.close(5.0)
        counters = self._publisher.counters()
        return counters.dropped_queue_full + counters.dropped_sink + counters.dropped_invalid


class Tapped:
    """Counted where it is looked up."""

    def __init__(self, collection: flexd.EmbeddingCollection) -> None:
        self._seconds = 0.0
        self.tap: flexd.Tap | None = flexd.Tap(
            collection, interval_steps=TAP_STEPS, max_bytes=64 * 2**20, clock=lambda: self._seconds
        )

    def batch(self, features: Mapping[str, flexd.Jagged], seconds: float) -> None:
        self._seconds = seconds

    def close(self) -> int:
        return 0 if self.tap is None else self.tap.counters.dropped


def accesses_of(
    collection: flexd.EmbeddingCollection, rank: int, *, tap: bool, kafka: str | None, topic: str, file_log: str
) -> Accesses:
    """As the run's setup says."""
    if tap:
        return Tapped(collection)
    if kafka:
        from flexd.stream.kafka.sink import KafkaSink

        return Published(KafkaSink(kafka, topic), rank)
    from flexd.stream.file_log.log import FileLogSink

    return Published(FileLogSink(Path(file_log), f"rank-{rank}"), rank)
