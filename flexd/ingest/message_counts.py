"""Counts of stream messages by outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flexd.sketch.types import AccessCounts

MAX_REASONS = 64
"""Distinct rejection reasons that are counted by name; the rest is counted as ``other``."""


@dataclass(frozen=True)
class MessageCounts:
    """Counts of some messages.

    Attributes:
        messages, bytes: read, including the rejected ones.
        batches: of the accepted messages.
        accesses: of the accepted messages, by outcome.
        rejected: messages not counted, by reason.
    """

    messages: int = 0
    bytes: int = 0
    batches: int = 0
    accesses: AccessCounts = field(default_factory=AccessCounts)
    rejected: Mapping[str, int] = field(default_factory=dict)
