"""What a lease is kept in: one record that is replaced only by somebody who has seen its present content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

MAX_HOLDER_CHARACTERS = 256
MAX_TERM = 2**31 - 1
"""Kubernetes keeps the term in a signed 32-bit number."""
MAX_DURATION_SECONDS = 86_400.0


@dataclass(frozen=True)
class LeaseRecord:
    """The record at one moment.

    Attributes:
        holder: identity of the process that has it; empty if it was released.
        term: the fencing number of the holder, from 1; grows with every acquisition.
        duration_seconds: for so long after its last renewal the holder may believe in it.
        revision: differs after every write, also when nothing else does; opaque.
    """

    holder: str
    term: int
    duration_seconds: float
    revision: str


class LeaseStore(Protocol):
    """Shared by all daemons that may lead. Clocks play no part here: see ``flexd.ha.lease``."""

    @property
    def location(self) -> str:
        """For people: which file or object."""
        ...

    def read(self) -> LeaseRecord | None:
        """The newest record; None if there never was one.

        Raises:
            LeaseError: it cannot be reached or read.
        """
        ...

    def compare_and_set(
        self, seen: LeaseRecord | None, holder: str, term: int, duration_seconds: float
    ) -> LeaseRecord | None:
        """Writes a record if the newest one is still ``seen`` (None: if there is none); of several callers that have
        seen the same one, at most one succeeds. The record as written, or None if another one is there.

        Raises:
            LeaseError: it cannot be reached or written. Whether the record was replaced is not known then.
        """
        ...

    def close(self) -> None:
        """Lets go of connections; the record stays."""
        ...
