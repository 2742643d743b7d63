"""Decode both kinds of message of a stream: accesses, and the counts of a tap."""

from __future__ import annotations

from collections.abc import Sequence

from flexd.core import tap_counts
from flexd.core.tap_counts import TapCounts
from flexd.stream.codecs import codec
from flexd.stream.types import AccessBatch


def decode(payload: bytes | memoryview, max_message_bytes: int) -> Sequence[AccessBatch | TapCounts]:
    """Decode a message; its first bytes tell the kind. Counts of a tap have a size limit of their own
    (``tap_counts.MAX_PAYLOAD_BYTES``): one message stands for a whole interval of a rank.

    Raises:
        CodecError: ``reason`` is one of ``codec.REASONS`` or ``tap_counts.REASONS``.
    """
    if tap_counts.is_tap_counts(payload):
        return [tap_counts.decode(payload)]
    return codec.decode(payload, max_message_bytes)
