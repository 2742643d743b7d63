"""The tables that ranks have, where they are not the daemon's."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from flexd.control.protocol.messages import Hello, TableList
from flexd.control.protocol.rows import Bytes
from flexd.control.protocol.table_lists import tables_of_body
from flexd.core.keyspace import TableSpec

_MAX_LISTS = 4
"""Lists and attempts that are kept; beyond that, the oldest is dropped."""


@dataclass(frozen=True)
class ProposedTables:
    """Tables that all ranks of an attempt have."""

    attempt: str
    tables: tuple[TableSpec, ...]


class TableProposals:
    """Collects hellos of ranks with other tables than the daemon has. Thread-safe.

    Args:
        fresh_seconds: a rank counts for so long after its hello.
    """

    def __init__(self, fresh_seconds: float) -> None:
        self._fresh = fresh_seconds
        self._lock = threading.Lock()
        self._tables: dict[str, tuple[TableSpec, ...]] = {}
        """By digest."""
        self._hellos: dict[str, dict[int, tuple[Hello, float]]] = {}
        """By attempt and rank, with the time of each."""

    def record_tables(self, message: TableList, body: Bytes) -> None:
        """Record the list of a rank. Raises ControlError: it cannot be read."""
        digest = message.digest
        tables = self.tables_of(digest) or tables_of_body(body, digest)
        with self._lock:
            self._tables.pop(digest, None)
            self._tables[digest] = tables
            if len(self._tables) > _MAX_LISTS:
                del self._tables[next(iter(self._tables))]

    def tables_of(self, digest: str) -> tuple[TableSpec, ...]:
        """Return the tables of a digest; none if no rank has sent them."""
        with self._lock:
            return self._tables.get(digest, ())

    def record_hello(self, hello: Hello, now: float) -> None:
        with self._lock:
            of_attempt = self._hellos.pop(hello.attempt, {})
            self._hellos[hello.attempt] = of_attempt
            of_attempt[hello.rank] = (hello, now)
            if len(self._hellos) > _MAX_LISTS:
                del self._hellos[next(iter(self._hellos))]

    def proposed(self, now: float) -> ProposedTables | None:
        """Return the tables of an attempt whose ranks have all said hello lately, with equal tables; the newest."""
        with self._lock:
            for attempt, of_rank in reversed(self._hellos.items()):
                fresh = [hello for hello, at in of_rank.values() if now - at <= self._fresh]
                digests = {hello.table_digest for hello in fresh}
                if len(digests) == 1 and len(fresh) == fresh[0].world_size:
                    tables = self._tables.get(fresh[0].table_digest)
                    if tables is not None:
                        return ProposedTables(attempt, tables)
            return None

    def waits_for(self, now: float) -> str:
        """Return what is missing, in words."""
        with self._lock:
            if not self._hellos:
                return "no rank has registered"
            attempt, of_rank = next(reversed(self._hellos.items()))
            fresh = [hello for hello, at in of_rank.values() if now - at <= self._fresh]
            if not fresh:
                return f"the ranks of attempt {attempt!r} have left"
            if len({hello.table_digest for hello in fresh}) > 1:
                return f"ranks of attempt {attempt!r} have different tables"
            if len(fresh) < fresh[0].world_size:
                return f"{len(fresh)} of {fresh[0].world_size} ranks of attempt {attempt!r} have registered"
            return f"no rank of attempt {attempt!r} has sent its tables"
