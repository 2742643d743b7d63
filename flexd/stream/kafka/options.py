"""Options of the Kafka client that a caller may set, and the errors that no retry can fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kafka.errors import KafkaConfigurationError

from flexd.core.errors import StreamError

ClientOption = str | int | float | bool

FATAL_ERRORS = (KafkaConfigurationError, ValueError, TypeError, AssertionError, FileNotFoundError, PermissionError)
"""Exceptions that the client's constructor raises for wrong options."""
_RESERVED = frozenset(
    (
        "bootstrap_servers",
        "group_id",
        "enable_auto_commit",
        "auto_offset_reset",
        "isolation_level",
        "value_deserializer",
        "value_serializer",
    )
)
_SECURITY_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")


def checked_options(client_options: Mapping[str, ClientOption] | None) -> dict[str, Any]:
    """Check the options and convert them to the types that the client expects.

    Raises:
        StreamError: an option is reserved for flexd, or would make the client try to connect for ever.
    """
    options = dict(client_options or {})
    reserved = sorted(_RESERVED & options.keys())
    if reserved:
        raise StreamError(f"Kafka client options {', '.join(reserved)} are set by flexd", remedy="leave them out")
    protocol = options.get("security_protocol", "PLAINTEXT")
    if protocol not in _SECURITY_PROTOCOLS:
        # With an unknown protocol the client would try to connect for ever.
        raise StreamError(
            f"Kafka security_protocol {protocol!r}", remedy=f"use one of {', '.join(_SECURITY_PROTOCOLS)}"
        )
    if isinstance(version := options.get("api_version"), str):
        options["api_version"] = tuple(int(part) for part in version.split("."))  # type: ignore[assignment]
    return options
