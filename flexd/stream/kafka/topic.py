"""Makes a topic for runs that bring their own, such as the demo."""

from __future__ import annotations

import time

from kafka import KafkaAdminClient
from kafka.admin import NewTopic
from kafka.errors import KafkaError, TopicAlreadyExistsError

from flexd.core.errors import StreamError


def ensure_topic(bootstrap_servers: str, topic: str, *, partitions: int, timeout_seconds: float) -> None:
    """Makes the topic unless it exists.

    Raises:
        StreamError: the broker cannot be reached or refuses, within the deadline.
    """
    deadline = time.monotonic() + timeout_seconds
    failure: Exception | None = None
    while time.monotonic() < deadline:
        try:
            client = KafkaAdminClient(
                bootstrap_servers=bootstrap_servers.split(","),
                request_timeout_ms=5_000,
                bootstrap_timeout_ms=5_000,
            )
            try:
                client.create_topics([NewTopic(topic, partitions, 1)], timeout_ms=5_000)
            finally:
                client.close()
            return
        except TopicAlreadyExistsError:
            return
        except (KafkaError, OSError, AssertionError) as error:
            failure = error
            time.sleep(0.3)
    raise StreamError(
        f"topic {topic!r} cannot be made at {bootstrap_servers} in {timeout_seconds:g} s: {failure}",
        remedy="check the address, and that the user may create topics",
    )
