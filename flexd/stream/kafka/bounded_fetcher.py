"""Make a kafka-python consumer read fetches with ``BatchReader``: the only place that reaches into kafka-python.

``Fetcher`` gives each fetched range of a partition to an object of its class ``PartitionRecords``, which decompresses
batches as a whole and raises at the same offset for ever where one is damaged. The subclasses here replace that class,
and end a poll after a number of bytes. ``check_client`` refuses versions of kafka-python whose methods differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import kafka
from kafka import KafkaConsumer
from kafka.consumer.fetcher import Fetcher
from kafka.errors import KafkaError
from kafka.record import MemoryRecords

from flexd.core.errors import StreamError
from flexd.stream.kafka.record_batches import BatchLimits, BatchReader, Item
from flexd.stream.offsets_in_work import OffsetsInWork

_EXPECTED = {
    "__init__": "fetch_offset tp records key_deserializer value_deserializer check_crcs isolation_level"
    " aborted_transactions metric_aggregator on_drain",
    "_unpack_records": "tp records key_deserializer value_deserializer",
    "take": "n",
    "drain": "",
}
"""Methods of ``PartitionRecords`` that are called or replaced, with their parameters."""
_EXPECTED_OF_FETCHER = {
    "__init__": "client subscriptions configs",
    "fetched_records": "max_records update_offsets",
    "_append": "drained part max_records update_offsets",
    "_parse_fetched_data": "completed_fetch",
}


def check_client() -> None:
    """Check that the installed kafka-python has the methods that are replaced here.

    Raises:
        StreamError: it has others, so that batches would be decompressed without bounds.
    """
    wrong = [
        f"{owner.__qualname__}.{name}"
        for owner, methods in ((Fetcher.PartitionRecords, _EXPECTED), (Fetcher, _EXPECTED_OF_FETCHER))
        for name, parameters in methods.items()
        if _parameters(getattr(owner, name, None)) != parameters.split()
    ]
    if not hasattr(MemoryRecords(b""), "_buffer"):
        wrong.append("MemoryRecords._buffer")
    if wrong:
        raise StreamError(
            f"kafka-python {kafka.__version__} cannot be bounded: {', '.join(wrong)} changed",
            remedy="install the version of kafka-python that flexd's lock file names",
        )


def bounded_consumer(options: Mapping[str, Any], limits: BatchLimits, work: OffsetsInWork) -> KafkaConsumer:
    """Return a consumer whose polls return messages and refused ranges (``Item``) instead of kafka-python's records.

    Raises:
        StreamError: the installed kafka-python cannot be bounded.
        KafkaError, ValueError, TypeError, AssertionError, OSError: as the constructor of ``KafkaConsumer``.
    """
    check_client()
    consumer = KafkaConsumer(**options)
    if type(consumer._fetcher) is not Fetcher:
        consumer.close(autocommit=False)
        raise StreamError(
            f"kafka-python {kafka.__version__} cannot be bounded: its consumer has another fetcher",
            remedy="install the version of kafka-python that flexd's lock file names",
        )
    consumer._fetcher = BoundedFetcher(consumer, limits, work)
    return consumer


class BoundedFetcher(Fetcher):  # type: ignore[misc]
    """A fetcher whose polls end at ``limits.max_poll_bytes`` and whose batches are read within ``limits``."""

    def __init__(self, consumer: KafkaConsumer, limits: BatchLimits, work: OffsetsInWork) -> None:
        super().__init__(consumer._client, consumer._subscription, metrics=consumer._metrics, **consumer.config)
        self.limits = limits
        self.work = work
        self._bytes_left = 0
        self.PartitionRecords = self._partition_records

    def fetched_records(self, max_records: int | None = None, update_offsets: bool = True) -> Any:
        self._bytes_left = self.limits.max_poll_bytes
        try:
            return super().fetched_records(max_records, update_offsets=update_offsets)
        finally:
            self.work.end()

    def _append(self, drained: Any, part: Any, max_records: int, update_offsets: bool) -> int:
        if self._bytes_left <= 0:
            # As many as are wanted: the poll ends, and the rest is taken by the next one.
            return max_records
        if part:
            part.bytes_left = self._bytes_left
        taken: int = super()._append(drained, part, max_records, update_offsets)
        if taken:
            self._bytes_left = part.bytes_left
        return taken

    def _parse_fetched_data(self, completed_fetch: Any) -> Any:
        try:
            return super()._parse_fetched_data(completed_fetch)
        except KafkaError:
            records = completed_fetch.partition_data.records
            if completed_fetch.partition_data.error_code or not records or MemoryRecords(records).has_next():
                raise
            # Not one whole batch: raised again at the same offset for ever.
            return self._partition_records(
                completed_fetch.fetched_offset, completed_fetch.topic_partition, MemoryRecords(records),
                on_drain=self._on_partition_records_drain,
            )  # fmt: skip

    def _partition_records(self, *args: Any, **kwargs: Any) -> BoundedPartitionRecords:
        return BoundedPartitionRecords(self.limits, self.work, *args, **kwargs)


class BoundedPartitionRecords(Fetcher.PartitionRecords):  # type: ignore[misc]
    """One fetched range of a partition, read with a ``BatchReader``.

    Attributes:
        bytes_left: ``take`` ends when it is used up.
    """

    def __init__(self, limits: BatchLimits, work: OffsetsInWork, *args: Any, **kwargs: Any) -> None:
        self._limits = limits
        self._work = work
        self.bytes_left = limits.max_poll_bytes
        self._record_bytes = 0
        super().__init__(*args, **kwargs)

    def _next_items(self, n: int | None = None) -> list[Item]:
        taken: list[Item] = []
        iterator = self.record_iterator
        while iterator is not None and (n is None or len(taken) < n) and self.bytes_left > 0:
            item = next(iterator, None)
            if item is None:
                break
            taken.append(item)
            self.bytes_left -= self._record_bytes
        return taken

    take = _next_items

    def _unpack_records(self, tp: Any, records: Any, key_deserializer: Any, value_deserializer: Any) -> Iterator[Item]:
        data = memoryview(records._buffer or b"")
        reader = BatchReader(
            f"{tp.topic}/{tp.partition}", data, self.fetch_offset, self._limits, self._work
        )  # fmt: skip
        for item in reader:
            self.next_fetch_offset, self.leader_epoch = reader.next_offset, reader.leader_epoch
            self._record_bytes = reader.record_bytes
            self.bytes_read += reader.record_bytes
            self.records_read += 1
            yield item
        self.next_fetch_offset, self.leader_epoch = reader.next_offset, reader.leader_epoch
        self.drain()


def _parameters(method: Any) -> list[str]:
    if method is None:
        return ["missing"]
    return [name for name in inspect.signature(method).parameters if name != "self"]
