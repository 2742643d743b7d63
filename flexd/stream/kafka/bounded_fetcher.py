"""Make a kafka-python consumer read fetches within bounds: nothing that a producer wrote can cost more than its batch.

The only place that reaches into kafka-python. ``Fetcher`` gives each fetched range of a partition to an object of its
class ``PartitionRecords``, which decompresses batches as a whole and raises at the same offset for ever where one is
damaged. The subclasses here read it with ``BatchReader``, and end a poll after a number of bytes. ``check_client``
refuses versions of kafka-python whose methods differ.

Of each batch the checksum, the number of records and the decompressed size are checked before its records are read. A
batch that fails is passed over as a whole (``RefusedMessages``), as are the records behind one that cannot be read, so
that the position always moves on. Format 2 (https://kafka.apache.org/documentation/#recordbatch) is read, which every
producer since 2017 writes; headers and keys of records are not, since no message of flexd has any.

Messages of aborted transactions are not returned. What holds no message is (``EmptyOffsets``), because a position that
stays before it would lag for ever, and would be lost when the log is shortened.
"""

from __future__ import annotations

import gzip
import inspect
import io
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import kafka
from kafka import KafkaConsumer
from kafka.consumer.fetcher import Fetcher
from kafka.errors import KafkaError
from kafka.record import MemoryRecords
from kafka.record.util import calc_crc32c

from flexd.core.errors import StreamError
from flexd.stream.types import TOMBSTONE, OffsetsInWork, RefusedMessages, StreamMessage

# Codes in a batch's attributes (``CODEC_MASK``).
NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
CODEC_MASK = 0x07
CODEC_NAMES = ("none", "gzip", "snappy", "lz4", "zstd")
HEAD_BYTES = 4096


class BatchRefusedError(Exception):
    """A record batch is not read.

    Attributes:
        reason: one of ``flexd.stream.types.REFUSAL_REASONS``.
        head: first decompressed bytes, if there are any.
    """

    def __init__(self, reason: str, detail: str, head: bytes = b"") -> None:
        super().__init__(detail)
        self.reason = reason
        self.head = head


def decompress(codec: int, data: memoryview, max_bytes: int) -> bytearray:
    """Decompress a batch's records.

    Raises:
        BatchRefusedError: they are larger than ``max_bytes`` (``batch_too_large``), damaged (``corrupt_batch``), or of
            an unknown codec (``unsupported_codec``).
    """
    if codec not in _PARTS:
        raise BatchRefusedError("unsupported_codec", f"compression codec {codec}")
    out = bytearray()
    try:
        for part in _PARTS[codec](data, max_bytes):
            out += part
            if len(out) > max_bytes:
                raise _too_large(max_bytes)
    except ImportError as error:
        raise BatchRefusedError("unsupported_codec", f"{CODEC_NAMES[codec]}: {error}; install flexd[daemon]") from error
    except BatchRefusedError as error:
        error.head = bytes(out[:HEAD_BYTES])
        raise
    except MemoryError:
        raise
    except Exception as error:
        # Each library has exceptions of its own.
        head = bytes(out[:HEAD_BYTES])
        raise BatchRefusedError("corrupt_batch", f"{CODEC_NAMES[codec]}: {error}"[:200], head) from error
    return out


def _too_large(max_bytes: int) -> BatchRefusedError:
    return BatchRefusedError("batch_too_large", f"over {max_bytes} bytes decompressed")


def _read(reader: Any, max_bytes: int) -> Iterator[bytes]:
    # Read a file-like decompressor in steps; at most one byte beyond the bound.
    left = max_bytes + 1
    while part := reader.read(min(2**20, left)):
        left -= len(part)
        yield part


def _gzip(data: memoryview, max_bytes: int) -> Iterator[bytes]:
    return _read(gzip.GzipFile(fileobj=io.BytesIO(data)), max_bytes)


def _lz4(data: memoryview, max_bytes: int) -> Iterator[bytes]:
    import lz4.frame

    return _read(lz4.frame.LZ4FrameFile(io.BytesIO(data), mode="rb"), max_bytes)


def _zstd(data: memoryview, max_bytes: int) -> Iterator[bytes]:
    import zstandard

    # A decoder allocates the window that the frame claims, 128 MiB by default.
    # Windows up to this size are accepted whatever the bound is: ordinary compression levels use them.
    decompressor = zstandard.ZstdDecompressor(max_window_size=max(8 * 2**20, 1 << (max_bytes - 1).bit_length()))
    return _read(decompressor.stream_reader(bytes(data), read_across_frames=True), max_bytes)


def _snappy(data: memoryview, max_bytes: int) -> Iterator[bytes]:
    import snappy

    left = max_bytes
    for block in _snappy_blocks(data):
        # The decoder allocates exactly the length that a block declares.
        left -= _snappy_length(block)
        if left < 0:
            raise _too_large(max_bytes)
        yield snappy.decompress(bytes(block))


def _snappy_blocks(data: memoryview) -> Iterator[memoryview]:
    if bytes(data[:8]) != b"\x82SNAPPY\x00":
        yield data
        return
    at = 16
    while at < len(data):
        (size,) = struct.unpack_from(">i", data, at)
        block = data[at + 4 : at + 4 + size]
        if size <= 0 or len(block) != size:
            raise ValueError("block length")
        yield block
        at += 4 + size


def _snappy_length(block: memoryview) -> int:
    length = 0
    for place, byte in enumerate(block[:5]):
        length |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return length
    raise ValueError("no length")


_PARTS: dict[int, Callable[[memoryview, int], Iterator[bytes]]] = {GZIP: _gzip, SNAPPY: _snappy, LZ4: _lz4, ZSTD: _zstd}


# Base offset, length of the rest.
_LOG = struct.Struct(">qi")
_MAGIC_AT = 16
_HEADER = struct.Struct(">qiibIhiqqqhii")
_TIMESTAMP_TYPE_MASK, _TRANSACTIONAL_MASK, _CONTROL_MASK = 0x08, 0x10, 0x20
# Version and type of a control record, which are its key.
_CONTROL_KEY = struct.Struct(">hh")
_ABORT = 0


@dataclass(frozen=True, slots=True)
class EmptyOffsets:
    """Offsets of a batch, both inclusive, that hold no message: a mark that a transaction ended, messages of one that
    was aborted, or keys that were compacted."""

    offset: int
    last_offset: int


Item = StreamMessage | RefusedMessages | EmptyOffsets


@dataclass(frozen=True)
class BatchLimits:
    """Bounds of what is read.

    Attributes:
        max_batch_bytes: of a batch's records, decompressed.
        max_batch_records: of a batch.
        max_poll_bytes: records that one poll returns, decompressed; a larger record is returned alone.
        max_poll_messages: that one poll returns.
    """

    max_batch_bytes: int = 64 * 2**20
    max_batch_records: int = 500_000
    max_poll_bytes: int = 16 * 2**20
    max_poll_messages: int = 2000


# Methods of ``PartitionRecords`` that are called or replaced, with their parameters.
_EXPECTED = {
    "__init__": "fetch_offset tp records key_deserializer value_deserializer check_crcs isolation_level"
    " aborted_transactions metric_aggregator on_drain",
    "_unpack_records": "tp records key_deserializer value_deserializer",
    "take": "n",
    "drain": "",
}
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
    """Return a consumer of committed messages, whose polls return ``Item`` instead of kafka-python's records.

    Raises:
        StreamError: the installed kafka-python cannot be bounded.
        KafkaError, ValueError, TypeError, AssertionError, OSError: as the constructor of ``KafkaConsumer``.
    """
    check_client()
    consumer = KafkaConsumer(**{**options, "isolation_level": "read_committed"})
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
        aborted = [(each.first_offset, each.producer_id) for each in self.aborted_transactions]
        reader = BatchReader(
            f"{tp.topic}/{tp.partition}", data, self.fetch_offset, self._limits, self._work, aborted
        )  # fmt: skip
        for item in reader:
            self.next_fetch_offset, self.leader_epoch = reader.next_offset, reader.leader_epoch
            self._record_bytes = reader.record_bytes
            self.bytes_read += reader.record_bytes
            self.records_read += 1
            yield item
        self.next_fetch_offset, self.leader_epoch = reader.next_offset, reader.leader_epoch
        self.drain()


class BatchReader:
    """The batches of one fetched range of a partition, from an offset on. Iterates over ``Item``.

    Args:
        partition: name of the partition.
        data: record batches as the broker sent them; the last one may be cut.
        from_offset: earlier messages of the first batch are dropped.
        work: records the batch that is being read.
        aborted: first offset and producer of each aborted transaction in the range, by rising offsets.

    Attributes:
        next_offset: behind everything that was returned or passed over.
        leader_epoch: of the last batch.
        record_bytes: size of the last record that was returned.
    """

    def __init__(
        self,
        partition: str,
        data: memoryview,
        from_offset: int,
        limits: BatchLimits,
        work: OffsetsInWork,
        aborted: Iterable[tuple[int, int]] = (),
    ) -> None:
        self._partition = partition
        self._data = data
        self._limits = limits
        self._work = work
        self.next_offset = from_offset
        self.leader_epoch = -1
        self.record_bytes = 0
        self._damaged = False
        self._aborted = deque(aborted)
        self._aborting: set[int] = set()

    def __iter__(self) -> Iterator[Item]:
        at, end, start = 0, len(self._data), self.next_offset
        while end - at >= _LOG.size:
            base, length = _LOG.unpack_from(self._data, at)
            batch = self._data[at : at + _LOG.size + max(length, 0)]
            if length < 0 or len(batch) < _LOG.size + length:
                if at == 0:
                    # Fetched again, it would be cut again.
                    yield self._refused(self._last_offset(base, batch), "corrupt_batch", f"of {length} bytes", batch)
                return
            at += len(batch)
            yield from self._guarded(base, batch)
        if self._damaged and self.next_offset == start:
            yield self._refused(start, "corrupt_batch", "no offset that fits", self._data)

    def _guarded(self, base: int, batch: memoryview) -> Iterator[Item]:
        # Read one batch; what cannot be read of it becomes one refused range.
        last = self._last_offset(base, batch)
        try:
            magic = batch[_MAGIC_AT]
            if last < self.next_offset:
                return
            if not self._work.begin(self._partition, base, last):
                raise BatchRefusedError("poison_offset", "the daemon ended twice while it read this batch")
            if magic != 2:
                raise BatchRefusedError("corrupt_batch", f"format {magic}")
            yield from self._read(base, last, batch)
        except BatchRefusedError as error:
            refused = error
        except (struct.error, ValueError, IndexError, OverflowError) as error:
            refused = BatchRefusedError("corrupt_batch", f"records: {error}"[:200])
        else:
            if self.next_offset <= last:
                yield self._empty(base, last)
            return
        if self.next_offset <= last:
            yield self._refused(last, refused.reason, str(refused), batch, refused.head)
        else:
            self._damaged = True

    @staticmethod
    def _last_offset(base: int, batch: memoryview) -> int:
        # Return the last offset that a batch claims, its first one if it claims none.
        if len(batch) < _HEADER.size or batch[_MAGIC_AT] != 2:
            return base
        return base + max(int(_HEADER.unpack_from(batch)[6]), 0)

    def _read(self, base: int, last: int, batch: memoryview) -> Iterator[Item]:
        _, _, epoch, _, crc, attributes, _, base_time, max_time, producer, _, _, count = _HEADER.unpack_from(batch)
        # The checksum covers the attributes and everything behind them.
        if calc_crc32c(batch[21:]) != crc:
            raise BatchRefusedError("corrupt_batch", "checksum")
        self.leader_epoch = epoch
        while self._aborted and self._aborted[0][0] <= last:
            self._aborting.add(self._aborted.popleft()[1])
        if attributes & _CONTROL_MASK:
            if _is_abort(batch[_HEADER.size :]):
                self._aborting.discard(producer)
            return
        if attributes & _TRANSACTIONAL_MASK and producer in self._aborting:
            return
        records = batch[_HEADER.size :]
        limits = self._limits
        if not 0 <= count <= limits.max_batch_records:
            raise BatchRefusedError("batch_too_many_records", f"{count} records, {limits.max_batch_records} allowed")
        codec = attributes & CODEC_MASK
        if codec != NONE:
            records = memoryview(decompress(codec, records, limits.max_batch_bytes))
        elif len(records) > limits.max_batch_bytes:
            raise BatchRefusedError("batch_too_large", f"{len(records)} bytes, {limits.max_batch_bytes} allowed")
        if count * 7 > len(records):
            raise BatchRefusedError(
                "corrupt_batch", f"{count} records in {len(records)} bytes", bytes(records[:HEAD_BYTES])
            )
        appended = max_time / 1000 if attributes & _TIMESTAMP_TYPE_MASK else None
        at, expected = 0, base
        for _ in range(count):
            length, at = _varint(records, at)
            end = at + length
            if length < 0 or end > len(records):
                raise ValueError("a record ends beyond its batch")
            milliseconds, position = _varint(records, at + 1)
            delta, position = _varint(records, position)
            key_bytes, position = _varint(records, position)
            value_bytes, position = _varint(records, position + max(key_bytes, 0))
            offset, stop = base + delta, position + max(value_bytes, 0)
            if not expected <= offset <= last or stop > end:
                raise ValueError(f"a record at offset {offset}")
            expected = offset + 1
            if offset >= self.next_offset:
                if max(self.next_offset, base) < offset:
                    yield self._empty(base, offset - 1)
                self.next_offset = expected
                self.record_bytes = end - at
                if value_bytes < 0:
                    yield RefusedMessages(self._partition, offset, offset, TOMBSTONE, "no value", b"", end - at)
                else:
                    own = (base_time + milliseconds) / 1000 if appended is None and base_time >= 0 else appended
                    yield StreamMessage(self._partition, offset, records[position:stop], appended, own)
            at = end
        if at != len(records):
            raise ValueError(f"{len(records) - at} bytes behind the last record")

    def _empty(self, base: int, last: int) -> EmptyOffsets:
        # Offsets before the batch are not known to hold none.
        first, self.next_offset, self.record_bytes = max(self.next_offset, base), last + 1, 0
        return EmptyOffsets(first, last)

    def _refused(self, last: int, reason: str, detail: str, batch: memoryview, head: bytes = b"") -> RefusedMessages:
        first = self.next_offset
        last = max(first, last)
        self.next_offset = last + 1
        self.record_bytes = HEAD_BYTES
        return RefusedMessages(
            self._partition, first, last, reason, detail, head or bytes(batch[:HEAD_BYTES]), len(batch)
        )


def _is_abort(records: memoryview) -> bool:
    # Whether the one record of a control batch, which is never compressed, marks the end of an aborted transaction.
    at = _varint(records, 0)[1] + 1
    for _ in ("time", "offset", "bytes of the key"):
        at = _varint(records, at)[1]
    kind: int = _CONTROL_KEY.unpack_from(records, at)[1]
    return kind == _ABORT


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    # Return a zig-zag varint of at most ten bytes and the position behind it.
    byte = data[at]
    at += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), at
    value, shift = byte & 0x7F, 7
    while byte >= 0x80:
        if shift > 63:
            raise ValueError("a number of more than ten bytes")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
    return (value >> 1) ^ -(value & 1), at


def _parameters(method: Any) -> list[str]:
    if method is None:
        return ["missing"]
    return [name for name in inspect.signature(method).parameters if name != "self"]
