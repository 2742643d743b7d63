"""Options of the Kafka client that a caller may give, and what of them no retry can mend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kafka.errors import KafkaConfigurationError

from flexd.core.errors import StreamError

ClientOption = str | int | float | bool

FATAL = (KafkaConfigurationError, ValueError, TypeError, AssertionError, FileNotFoundError, PermissionError)
"""What a constructor of the client raises for its options."""
_OURS = frozenset(
    (
        "bootstrap_servers",
        "group_id",
        "enable_auto_commit",
        "auto_offset_reset",
        "value_deserializer",
        "value_serializer",
    )
)
_SECURITY_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")


def for_a_producer(client_options: Mapping[str, ClientOption]) -> dict[str, ClientOption]:
    """Without those that only a consumer has, which a producer refuses; what both have is how to reach the broker."""
    from kafka import KafkaConsumer, KafkaProducer

    only_consumers = KafkaConsumer.DEFAULT_CONFIG.keys() - KafkaProducer.DEFAULT_CONFIG.keys()
    return {name: value for name, value in client_options.items() if name not in only_consumers}


def checked(client_options: Mapping[str, ClientOption] | None) -> dict[str, Any]:
    """The options as the client takes them.

    Raises:
        StreamError: one is flexd's to set, or would make the client try for ever.
    """
    options = dict(client_options or {})
    ours = sorted(_OURS & options.keys())
    if ours:
        raise StreamError(f"Kafka client options {', '.join(ours)} are set by flexd", remedy="leave them out")
    protocol = options.get("security_protocol", "PLAINTEXT")
    if protocol not in _SECURITY_PROTOCOLS:
        # The client itself would try to connect for ever.
        raise StreamError(
            f"Kafka security_protocol {protocol!r}", remedy=f"use one of {', '.join(_SECURITY_PROTOCOLS)}"
        )
    if isinstance(version := options.get("api_version"), str):
        options["api_version"] = tuple(int(part) for part in version.split("."))  # type: ignore[assignment]
    return options
