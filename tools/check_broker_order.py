"""Count the messages that a tailing consumer skips while several producers write to one partition.

``python tools/check_broker_order.py --seconds 30`` starts tansu, four producers, a plain kafka-python consumer and
flexd's source. Prints one JSON object: the messages that each reader read, and how many it skipped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from multiprocessing.queues import Queue

from tansu_broker import TansuBroker

TOPIC = "order"
PRODUCERS = 4
_TAIL_SECONDS = 5.0


def _produce(address: str, seconds: float) -> None:
    from kafka import KafkaProducer

    producer = KafkaProducer(bootstrap_servers=address, linger_ms=0)
    end, sent = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        producer.send(TOPIC, b"x" * 800, partition=0)
        sent += 1
        if sent % 4 == 0:
            time.sleep(0.001)
    producer.flush(20)


def _plain(address: str, seconds: float, results: Queue[tuple[str, int, int]]) -> None:
    from kafka import KafkaConsumer, TopicPartition

    consumer = KafkaConsumer(bootstrap_servers=address)
    partition = TopicPartition(TOPIC, 0)
    consumer.assign([partition])
    consumer.seek(partition, 0)
    read, last, end = 0, -1, time.monotonic() + seconds + _TAIL_SECONDS
    while time.monotonic() < end:
        for records in consumer.poll(100).values():
            read, last = read + len(records), records[-1].offset
    results.put(("plain", read, last + 1 - read))


def _flexd(address: str, seconds: float, results: Queue[tuple[str, int, int]]) -> None:
    from flexd.stream.kafka.source import KafkaSource

    source = KafkaSource(address, TOPIC, "group", session_timeout_seconds=2.0)
    read, last, end = 0, -1, time.monotonic() + seconds + _TAIL_SECONDS
    while time.monotonic() < end:
        for message in source.poll(0.1):
            read, last = read + 1, message.offset
    results.put(("flexd", read, last + 1 - read))
    source.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    seconds = parser.parse_args().seconds
    results: Queue[tuple[str, int, int]] = multiprocessing.Queue()
    with TansuBroker(topics={TOPIC: 1}) as broker:
        address = broker.bootstrap_servers
        jobs = [multiprocessing.Process(target=_produce, args=(address, seconds)) for _ in range(PRODUCERS)]
        jobs += [multiprocessing.Process(target=_plain, args=(address, seconds, results))]
        jobs += [multiprocessing.Process(target=_flexd, args=(address, seconds, results))]
        for job in jobs:
            job.start()
        readers = [results.get(timeout=seconds + 60) for _ in range(2)]
        for job in jobs:
            job.join(30)
    print(json.dumps({name: {"messages": read, "skipped": skipped} for name, read, skipped in sorted(readers)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
