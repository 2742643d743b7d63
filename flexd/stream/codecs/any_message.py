"""Both kinds of message that a stream may carry: accesses one by one, and counted ones."""

from __future__ import annotations

from collections.abc import Sequence

from flexd.core import counted_accesses as counted
from flexd.core.counted_accesses import CountedBatch
from flexd.stream.codecs import codec
from flexd.stream.types import AccessBatch


def decode(payload: bytes | memoryview, max_message_bytes: int) -> Sequence[AccessBatch | CountedBatch]:
    """What a message holds, told apart by its first bytes. Counted accesses have a limit of their own
    (``counted.MAX_PAYLOAD_BYTES``): one message stands for a whole interval of a rank.

    Raises:
        CodecError: ``reason`` is one of ``codec.REASONS`` or ``counted.REASONS``.
    """
    if counted.is_counted(payload):
        return [counted.decode(payload)]
    return codec.decode(payload, max_message_bytes)
