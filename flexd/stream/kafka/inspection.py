"""A look at a topic from outside: joins no group, commits nothing, so that whoever reads it is not disturbed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexd.core.errors import StreamError


@dataclass(frozen=True)
class TopicLook:
    """A topic as it is now.

    Attributes:
        partitions: 0 if there is no such topic. messages: kept by the broker, as offsets tell. payloads: of the newest.
    """

    partitions: int
    messages: int
    payloads: tuple[bytes, ...]


def look(
    bootstrap_servers: str,
    topic: str,
    client: str,
    client_options: Mapping[str, Any],
    *,
    messages: int,
    timeout_seconds: float,
) -> TopicLook:
    """Partitions and the newest messages of a topic.

    Args:
        client: ``kafka-python`` or ``confluent``, whose options ``client_options`` are.
        messages: at most so many, spread over the partitions.

    Raises:
        StreamError: the broker cannot be reached, refuses, or is too slow for the deadline; or the client is not
            installed.
    """
    deadline = time.monotonic() + timeout_seconds
    try:
        if client == "confluent":
            return _with_confluent(bootstrap_servers, topic, client_options, messages, deadline)
        return _with_kafka_python(bootstrap_servers, topic, client_options, messages, deadline)
    except ImportError as error:
        raise StreamError(f"the client {client} is not installed", remedy="pip install 'flexd[confluent]'") from error


def _failed(bootstrap_servers: str, error: BaseException) -> StreamError:
    return StreamError(
        f"{bootstrap_servers}: {type(error).__name__}: {error}",
        remedy="check stream.source.bootstrap_servers, the network, and client_options",
    )


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


def _with_kafka_python(
    servers: str, topic: str, options: Mapping[str, Any], messages: int, deadline: float
) -> TopicLook:
    from kafka import KafkaConsumer, TopicPartition
    from kafka.errors import KafkaError

    consumer = None
    try:
        consumer = KafkaConsumer(
            **{
                "bootstrap_servers": [server.strip() for server in servers.split(",")],
                "group_id": None,
                "enable_auto_commit": False,
                "allow_auto_create_topics": False,
                "bootstrap_timeout_ms": int(1000 * _left(deadline)),
                "request_timeout_ms": 10_000,
                "metrics_enabled": False,
                **options,
            }
        )
        numbers = consumer.partitions_for_topic(topic)
        if not numbers:
            return TopicLook(0, 0, ())
        partitions = [TopicPartition(topic, number) for number in sorted(numbers)]
        consumer.assign(partitions)
        first, last = consumer.beginning_offsets(partitions), consumer.end_offsets(partitions)
        each = max(1, messages // len(partitions))
        for partition in partitions:
            consumer.seek(partition, max(first[partition], last[partition] - each))
        kept = sum(last[partition] - first[partition] for partition in partitions)
        payloads: list[bytes] = []
        wanted = min(messages, sum(min(each, last[p] - first[p]) for p in partitions))
        while len(payloads) < wanted and time.monotonic() < deadline:
            for records in consumer.poll(timeout_ms=int(1000 * min(1.0, _left(deadline)))).values():
                payloads += [record.value or b"" for record in records]
        return TopicLook(len(partitions), kept, tuple(payloads[:messages]))
    except (KafkaError, OSError, ValueError, AssertionError) as error:
        raise _failed(servers, error) from error
    finally:
        if consumer is not None:
            consumer.close(autocommit=False, timeout_ms=2_000)


def _with_confluent(servers: str, topic: str, options: Mapping[str, Any], messages: int, deadline: float) -> TopicLook:
    from confluent_kafka import Consumer, KafkaException, TopicPartition

    # librdkafka wants a group, though nothing of it is used: assigned partitions join none.
    consumer = Consumer({
        "bootstrap.servers": servers, "group.id": "flexd-doctor", "enable.auto.commit": False,
        "allow.auto.create.topics": False, "log_level": 0, **options,
    })  # fmt: skip
    try:
        known = consumer.list_topics(topic, timeout=_left(deadline)).topics.get(topic)
        if known is None or known.error is not None or not known.partitions:
            return TopicLook(0, 0, ())
        each, kept, wanted, chosen = max(1, messages // len(known.partitions)), 0, 0, []
        for number in sorted(known.partitions):
            first, last = consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=_left(deadline))
            kept, wanted = kept + last - first, wanted + min(each, last - first)
            chosen.append(TopicPartition(topic, number, max(first, last - each)))
        consumer.assign(chosen)
        payloads: list[bytes] = []
        wanted = min(messages, wanted)
        while len(payloads) < wanted and time.monotonic() < deadline:
            for record in consumer.consume(wanted, timeout=min(1.0, _left(deadline))):
                if record.error() is None:
                    payloads.append(record.value() or b"")
        return TopicLook(len(chosen), kept, tuple(payloads[:messages]))
    except KafkaException as error:
        raise _failed(servers, error) from error
    finally:
        consumer.close()
