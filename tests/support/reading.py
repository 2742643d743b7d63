"""Opening Kafka sources, and reading messages of a source until a condition holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flexd.config.sections import KafkaSourceConfig
from flexd.stream.kafka.source import KafkaSource
from flexd.stream.types import StreamMessage


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
