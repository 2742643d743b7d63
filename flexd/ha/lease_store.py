"""The store of a lease: one record, replaced only by a writer that has read its current content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

MAX_HOLDER_CHARACTERS = 256
MAX_TERM = 2**31 - 1
"""Kubernetes keeps the term in a signed 32-bit number."""
MAX_DURATION_SECONDS = 86_400.0


@dataclass(frozen=True)
class LeaseRecord:
    """The record of a lease.

    Attributes:
        holder: identity of the process that holds it; empty if it was released.
        term: fencing number of the holder, from 1; grows with every acquisition.
        duration_seconds: how long after its last renewal the lease is valid for its holder.
        revision: opaque; differs after every write, even if nothing else does.
    """

    holder: str
    term: int
    duration_seconds: float
    revision: str


class LeaseStore(Protocol):
    """A lease record that all daemons share. Independent of clocks; ``flexd.ha.lease`` has the rules of time."""

    @property
    def location(self) -> str:
        """The file or object, for messages."""
        ...

    def read(self) -> LeaseRecord | None:
        """Return the newest record; None if there never was one.

        Raises:
            LeaseError: the store cannot be reached or read.
        """
        ...

    def compare_and_set(
        self, seen: LeaseRecord | None, holder: str, term: int, duration_seconds: float
    ) -> LeaseRecord | None:
        """Write a record if the newest one is still ``seen`` (None: if there is none).

        Of several callers with the same ``seen``, at most one succeeds. Returns the written record, or None if another
        one is there.

        Raises:
            LeaseError: the store cannot be reached or written; the record may have been replaced.
        """
        ...

    def close(self) -> None:
        """Close connections; the record stays."""
        ...
