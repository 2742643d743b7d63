"""Create a topic, and inspect one without joining a consumer group."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kafka import KafkaAdminClient, TopicPartition
from kafka.admin import NewTopic
from kafka.errors import KafkaError, TopicAlreadyExistsError

from flexd.core.errors import StreamError
from flexd.stream.kafka.bounded_fetcher import BatchLimits, EmptyOffsets, bounded_consumer
from flexd.stream.types import OffsetsInWork, RefusedMessages, StreamMessage


@dataclass(frozen=True)
class TopicInspection:
    """The state of a topic.

    Attributes:
        partitions: number of partitions; 0 if the topic does not exist.
        offsets: number of offsets that the broker keeps; each holds at most one message.
        newest: the newest messages, and those that are refused.
    """

    partitions: int
    offsets: int
    newest: tuple[StreamMessage | RefusedMessages, ...]


def ensure_topic(bootstrap_servers: str, topic: str, *, partitions: int, timeout_seconds: float) -> None:
    """Create the topic unless it exists.

    Raises:
        StreamError: the broker cannot be reached or refuses, within the deadline.
    """
    milliseconds = int(1000 * timeout_seconds)
    try:
        client = KafkaAdminClient(
            bootstrap_servers=bootstrap_servers.split(","),
            request_timeout_ms=milliseconds,
            bootstrap_timeout_ms=milliseconds,
        )
        try:
            client.create_topics([NewTopic(topic, partitions, 1)], timeout_ms=milliseconds)
        finally:
            client.close()
    except TopicAlreadyExistsError:
        return
    except (KafkaError, OSError, AssertionError) as error:
        raise StreamError(
            f"topic {topic!r} cannot be created at {bootstrap_servers} in {timeout_seconds:g} s: {error}",
            remedy="check the address, and that the user may create topics",
        ) from error


def inspect_topic(
    bootstrap_servers: str,
    topic: str,
    client_options: Mapping[str, Any],
    *,
    messages: int,
    timeout_seconds: float,
) -> TopicInspection:
    """Count the partitions of a topic and read its newest messages.

    Joins no consumer group and commits nothing, so the topic's readers are not disturbed.

    Args:
        client_options: passed to kafka-python, over the defaults.
        messages: maximum number of messages to read, spread over the partitions.

    Raises:
        StreamError: the broker cannot be reached, refuses, or exceeds the deadline.
    """
    deadline = time.monotonic() + timeout_seconds
    consumer = None
    try:
        consumer = bounded_consumer(
            {
                "bootstrap_servers": [server.strip() for server in bootstrap_servers.split(",")],
                "group_id": None,
                "enable_auto_commit": False,
                "allow_auto_create_topics": False,
                "bootstrap_timeout_ms": int(1000 * _seconds_left(deadline)),
                "request_timeout_ms": 10_000,
                "metrics_enabled": False,
                **client_options,
            },
            BatchLimits(),
            OffsetsInWork(),
        )
        numbers = consumer.partitions_for_topic(topic)
        if not numbers:
            return TopicInspection(0, 0, ())
        partitions = [TopicPartition(topic, number) for number in sorted(numbers)]
        consumer.assign(partitions)
        first, last = consumer.beginning_offsets(partitions), consumer.end_offsets(partitions)
        each = max(1, messages // len(partitions))
        for partition in partitions:
            consumer.seek(partition, max(first[partition], last[partition] - each))
        kept = sum(last[partition] - first[partition] for partition in partitions)
        newest: list[StreamMessage | RefusedMessages] = []
        while (
            len(newest) < messages
            and time.monotonic() < deadline
            and any((consumer.position(partition, 0) or 0) < last[partition] for partition in partitions)
        ):
            for items in consumer.poll(timeout_ms=int(1000 * min(1.0, _seconds_left(deadline)))).values():
                newest += [item for item in items if not isinstance(item, EmptyOffsets)]
        return TopicInspection(len(partitions), kept, tuple(newest[:messages]))
    except (KafkaError, OSError, ValueError, AssertionError) as error:
        raise StreamError(
            f"{bootstrap_servers}: {type(error).__name__}: {error}",
            remedy="check stream.source.bootstrap_servers, the network, and client_options",
        ) from error
    finally:
        if consumer is not None:
            consumer.close(autocommit=False, timeout_ms=2_000)


def _seconds_left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())
