"""Options of librdkafka's consumer: ours, and those that a caller may give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexd.core.errors import StreamError
from flexd.stream.kafka.options import ClientOption

_OURS = frozenset(
    (
        "bootstrap.servers",
        "group.id",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "auto.offset.reset",
        "enable.partition.eof",
        "partition.assignment.strategy",
    )
)


def consumer_options(
    bootstrap_servers: str,
    group_id: str,
    client_options: Mapping[str, ClientOption] | None,
    *,
    session_timeout_seconds: float,
    max_poll_bytes: int,
) -> dict[str, Any]:
    """The caller's options over our defaults.

    Raises:
        StreamError: one is flexd's to set.
    """
    ours = sorted(_OURS & (client_options or {}).keys())
    if ours:
        raise StreamError(f"Kafka client options {', '.join(ours)} are set by flexd", remedy="leave them out")
    session_ms = int(session_timeout_seconds * 1000)
    return {
        "bootstrap.servers": bootstrap_servers,
        "group.id": group_id,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        # Resets are our decision, so that they are counted: the client must report instead.
        "auto.offset.reset": "error",
        "partition.assignment.strategy": "range,roundrobin",
        "allow.auto.create.topics": False,
        "session.timeout.ms": session_ms,
        "heartbeat.interval.ms": max(session_ms // 3, 1),
        "queued.max.messages.kbytes": max(max_poll_bytes // 1024, 1024),
        "fetch.message.max.bytes": max_poll_bytes // 4,
        "fetch.wait.max.ms": 100,
        # As kafka-python: the end of the log is the high-water mark, not the last stable offset.
        "isolation.level": "read_uncommitted",
        "topic.metadata.refresh.interval.ms": 10_000,
        "reconnect.backoff.max.ms": 2_000,
        **(client_options or {}),
    }
