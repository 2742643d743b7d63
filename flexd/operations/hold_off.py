"""Waiting of automatic planning after a failed migration: the next plan would probably fail the same way."""

from __future__ import annotations

from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_states import MigrationState

FIRST_SECONDS = 5.0
LONGEST_SECONDS = 300.0


class HoldOff:
    """Only the daemon's loop calls ``observe``; any thread may call the rest.

    The wait begins at ``FIRST_SECONDS`` and doubles up to ``LONGEST_SECONDS`` with every migration that fails without
    an applied chunk. A committed migration, and ranks of another topology generation, end it.
    """

    def __init__(self) -> None:
        self._newest: Migration | None = None
        self._next_seconds = FIRST_SECONDS
        self._until = 0.0
        self._failure: tuple[str, int | None] = ("", None)
        """Reason of the failure, and the topology generation of the migration."""

    def observe(self, migration: Migration | None, now: float) -> None:
        """Record the newest migration once it has ended.

        Args:
            now: monotonic seconds.
        """
        if migration is None or not migration.done or migration is self._newest:
            return
        self._newest = migration
        if migration.state is MigrationState.COMMITTED:
            self._next_seconds, self._until = FIRST_SECONDS, now
        elif migration.state is MigrationState.FAILED:
            if migration.record.chunks_applied:
                self._next_seconds = FIRST_SECONDS
            self._failure = (f"migration {migration.migration_id} failed: {migration.reason}", migration.generation)
            self._until = now + self._next_seconds
            self._next_seconds = min(LONGEST_SECONDS, 2 * self._next_seconds)

    def seconds(self, now: float, generation: int) -> float:
        """Return the rest of the wait, for ranks of this topology generation; 0 if there is none."""
        return max(0.0, self._until - now) if self._failure[1] in (None, generation) else 0.0

    def reason(self, now: float, generation: int) -> str:
        """Return why no plan is made now; empty if there is no reason."""
        seconds = self.seconds(now, generation)
        return f"{self._failure[0]} (tried again by itself in {seconds:.0f} s)" if seconds else ""
