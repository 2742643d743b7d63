"""CPU time of a message between a fetched range of Kafka and the ingest: flexd's reader beside kafka-python's.

    python tools/bench_record_batches.py

In memory, without a broker. The best of five runs; CPU time, which a busy machine changes little.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kafka.consumer.fetcher import Fetcher
from kafka.record import MemoryRecords, MemoryRecordsBuilder
from kafka.structs import TopicPartition

from flexd.stream.kafka.record_batches import BatchLimits, BatchReader
from flexd.stream.offsets_in_work import OffsetsInWork

CASES = (
    ("64 KiB, alone", 65_536, 1, 64, 0),
    ("80 B, 500 a batch", 80, 500, 20, 0),
    ("8 KiB, 8 a gzip batch", 8192, 8, 20, 1),
)
"""Label, bytes of a message, messages of a batch, batches, codec."""


def batches(size: int, messages: int, count: int, codec: int) -> bytes:
    """Return ``count`` batches with consecutive offsets."""
    data = bytearray()
    for number in range(count):
        builder = MemoryRecordsBuilder(2, codec, 2**30)
        for _ in range(messages):
            builder.append(timestamp=1, key=None, value=random.Random(number).randbytes(size))
        builder.close()
        one = bytearray(builder.buffer())
        one[:8] = (number * messages).to_bytes(8, "big")
        data += one
    return bytes(data)


def microseconds(work: Callable[[], object], count: int) -> float:
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best / count * 1e6


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        work = OffsetsInWork(Path(directory))
        for label, size, messages, count, codec in CASES:
            data, total = batches(size, messages, count, codec), messages * count

            def theirs(data: bytes = data, total: int = total) -> object:
                return Fetcher.PartitionRecords(0, TopicPartition("t", 0), MemoryRecords(data)).take(total)

            def ours(data: bytes = data) -> object:
                return list(BatchReader("t/0", memoryview(data), 0, BatchLimits(), work))

            them, us = microseconds(theirs, total), microseconds(ours, total)
            print(f"{label:<24} kafka-python {them:6.2f} us, flexd {us:6.2f} us a message")
        marks = microseconds(lambda: [work.begin("t/0", at, at, counting=True) for at in range(100_000)], 100_000)
        print(f"{'offsets in work':<24} {marks:.2f} us a message")
        work.close()


if __name__ == "__main__":
    main()
