"""What the HTTP side needs to show migrations and to stop them."""

from __future__ import annotations

from typing import Protocol

from flexd.server.migration_history import AbortPreview, AbortResult, MigrationDetail, MigrationList
from flexd.server.migration_report import MigrationStateName


class MigrationsApi(Protocol):
    """Called from several HTTP threads at once.

    Raises (every method):
        ApiError: this daemon migrates nothing (a follower: 409).
    """

    def migrations(self, limit: int, state: MigrationStateName | None) -> MigrationList:
        """At most ``limit`` of the history, the newest first; only those in ``state`` if one is given.

        Raises:
            SnapshotError: the history's file cannot be read.
        """
        ...

    def migration(self, migration_id: str) -> MigrationDetail:
        """One of the history; ``latest`` is the newest.

        Raises:
            ApiError: none of that id is kept (404).
            SnapshotError: the history's file cannot be read.
        """
        ...

    def preview_abort(self, *, rollback: bool) -> AbortPreview:
        """What ``abort`` would come to now. Changes nothing.

        Raises:
            ApiError: as ``abort``.
        """
        ...

    def abort(self, *, rollback: bool, reason: str, wait_seconds: float, who: str) -> AbortResult:
        """Stops what is under way at its next chunk, and goes back to where it started if ``rollback``.

        Waits at most ``wait_seconds``; a deadline that passes is no error.

        Raises:
            ApiError: nothing is under way (409), no ranks to roll back to (409), or shutting down (503).
        """
        ...
