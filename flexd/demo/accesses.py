"""Send the accesses of a demo rank to the daemon: id by id over a log, or counted by a tap."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import flexd
from flexd.stream.types import Sink

TAP_STEPS = 4
"""Steps between two deliveries of a tap's counts: event time jumps through the trace, so intervals are short."""


class Accesses(Protocol):
    """Receives every batch before it is looked up."""

    tap: flexd.Tap | None

    def batch(self, features: Mapping[str, flexd.Jagged], seconds: float) -> None:
        """Record the look-ups of one batch at event time ``seconds``."""

    def close(self) -> int:
        """End after the last step; return the number of accesses that were dropped."""


class Published:
    """Publishes every id to a sink."""

    tap: flexd.Tap | None = None

    def __init__(self, sink: Sink, rank: int) -> None:
        self._publisher = flexd.Publisher(sink, source_rank=rank)
        self._step = 0

    def batch(self, features: Mapping[str, flexd.Jagged], seconds: float) -> None:
        for name, jagged in features.items():
            if not jagged.values.numel():  # a table that no bag of this batch reads
                continue
            self._publisher.publish(name, jagged.values, jagged.lengths, event_time_seconds=seconds, step=self._step)
        self._step += 1

    def close(self) -> int:
        self._publisher.close(5.0)
        counters = self._publisher.counters()
        return counters.dropped_queue_full + counters.dropped_sink + counters.dropped_invalid


class Tapped:
    """Counts look-ups on the rank."""

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
    """Return the ``Accesses`` that the run's setup selects."""
    if tap:
        return Tapped(collection)
    if kafka:
        from flexd.stream.kafka.sink import KafkaSink

        return Published(KafkaSink(kafka, topic), rank)
    from flexd.stream.file_log.log import FileLogSink

    return Published(FileLogSink(Path(file_log), f"rank-{rank}"), rank)
