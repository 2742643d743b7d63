"""The partitions of a topic that are read where a share of the stream is enough."""

from __future__ import annotations

import hashlib
from collections.abc import Collection


def sampled_partitions(job: str, topic: str, partitions: Collection[int], share: float) -> frozenset[int]:
    """Return the partitions to read: those of the lowest hashes, ``share`` of all and at least one.

    They are the same at every start. A partition that is added to the topic takes the place of at most one other.
    """
    number = max(1, round(share * len(partitions)))
    return frozenset(sorted(partitions, key=lambda partition: _hash(f"{job}/{topic}/{partition}"))[:number])


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
