"""Take plans back that every rank has applied: restore the placement before one, or that of a version, and hold such
plans back for a while."""

import time
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.epoch_manager import LiveTopology
from flexd.control.daemon.migration import Migration, MigrationRecord
from flexd.core.errors import ApiError, SnapshotError
from flexd.core.placement import Delta, Placement
from flexd.operations.decisions import DecisionFile
from flexd.operations.executions import Executions
from flexd.operations.history import MigrationHistory
from flexd.operations.verification import HOLD_SECONDS, plan_kind

LATEST = "latest"
_TIERS = ("NODE", "DEVICE", "MOVED")


@dataclass(frozen=True)
class PastPlacement:
    """A placement to return to.

    Attributes:
        of: the migration that is taken back; None if a version was requested.
        placement: the one to restore, with its version.
        delta: the rows that move, from the live placement.
        takes_back: ids of the migrations whose changes are taken back, the newest first.
    """

    of: MigrationRecord | None
    placement: Placement
    delta: Delta
    takes_back: tuple[str, ...]
    live: LiveTopology


class Rollbacks:
    """Finds past placements, and returns to them. Thread-safe.

    What can be restored is what the placement journal still has.
    """

    def __init__(
        self, executions: Executions, coordinator: Coordinator, history: MigrationHistory, decisions: DecisionFile
    ) -> None:
        self._executions = executions
        self._coordinator = coordinator
        self._history = history
        self._decisions = decisions

    def find(self, migration_id: str, to_version: int | None) -> PastPlacement:
        """Return the placement before a migration, or that of a version. Changes nothing.

        Args:
            migration_id: a migration or its plan; ``LATEST``: the newest that is kept. Unused with a version.
            to_version: 0: all copies home.

        Raises:
            ApiError: there is no such migration (404). A migration is running, not all ranks are ready, the placement
                is not kept or is the live one, or rows of it were moved again since (409 each).
        """
        running = self._executions.last
        if running is not None and not running.done and not running.record.verifies:
            raise ApiError(
                f"migration {running.migration_id} is running", status=409,
                remedy="flexd rollback without an id stops it and restores the placement before it",
            )  # fmt: skip
        live = self._coordinator.live()
        if live is None or not live.ready:
            raise ApiError("not all ranks are ready", status=409, remedy="flexd status shows which are missing")
        kept = self._coordinator.journal.migrations()
        if to_version is None:
            return self._before(self._kept(migration_id, kept), kept, live)
        found = self._at(to_version, kept)
        delta = self._coordinator.placement().delta_to(found)
        if not len(delta):
            raise ApiError(
                f"the live placement is that of version {to_version}: nothing to take back", status=409,
                remedy=_versions(kept),
            )  # fmt: skip
        return PastPlacement(None, found, delta, _ids(kept, to_version), live)

    def restore(self, past: PastPlacement, reason: str, requested_by: str) -> Migration:
        """Start a migration to a placement that ``find`` has returned, and hold plans with any of the tiers back that
        it takes back.

        Raises:
            ControlError: the coordinator is stopping.
        """
        what = f"version {past.placement.version}" if past.of is None else past.of.migration_id
        undone = Delta(past.delta.keys, past.delta.new_tiers, past.delta.old_tiers)
        why = f"{what} was restored" if past.of is None else f"{what} was rolled back"
        message = f"{why} by {requested_by}" + (f": {reason}" if reason else "")
        self._decisions.hold(_kinds_like(plan_kind(undone)), message, HOLD_SECONDS, time.time())
        of = past.of or MigrationRecord(
            migration_id=f"version-{past.placement.version}", plan_id=self._executions.live_plan_id
        )
        if past.of is not None:
            # The next daemon resumes it even if this one ends before its first chunk.
            self._decisions.update(rollback=(of.migration_id,))
        name = self._executions.unused_id(of)
        return self._executions.start_rollback(
            of, past.placement, past.live.generation, reason, requested_by, name=name
        )  # fmt: skip

    def _before(self, of: MigrationRecord, kept: tuple[MigrationRecord, ...], live: LiveTopology) -> PastPlacement:
        now, journal = self._coordinator.placement(), self._coordinator.journal
        base, after = journal.placement_at(of.base_version), journal.placement_at(min(of.last_version, now.version))
        delta = now.delta_to(base)
        if not len(delta):
            raise ApiError(
                f"migration {of.migration_id} is rolled back already: the live placement is the one before it",
                status=409, remedy="flexd get history shows by which",
            )  # fmt: skip
        moved = int(np.count_nonzero(delta.old_tiers != after.tiers_of(delta.keys)))
        later = _ids(kept, of.last_version)
        if moved:
            raise ApiError(
                f"{moved} of the rows that would move were moved again after migration {of.migration_id}"
                + (f", by {', '.join(later)}" if later else ""),
                status=409,
                remedy=f"roll the newer ones back first, or all at once: flexd rollback --to {of.base_version}",
            )
        return PastPlacement(of, base, delta, (of.migration_id,), live)

    def _kept(self, migration_id: str, kept: tuple[MigrationRecord, ...]) -> MigrationRecord:
        plans = [each for each in kept if each.returns_to is None]
        found = next((each for each in reversed(plans) if migration_id in (each.migration_id, LATEST)), None)
        if found is not None:
            return found
        record = self._history.find(migration_id)
        if record is None:
            raise ApiError(
                f"no migration {migration_id[:100]!r} is kept", status=404,
                remedy="flexd get history shows those that are",
            )  # fmt: skip
        if record.verifies or record.returns_to is not None:
            problem = "is a rollback or a part of a verification, not a plan"
        elif not record.chunks_pushed:
            problem = "has moved no row"
        else:
            problem = "cannot be rolled back: the placement before it is not kept any more, as ranks have restarted or "
            problem += "many rows have moved since"
        raise ApiError(f"migration {migration_id} {problem}", status=409, remedy=_versions(kept))

    def _at(self, version: int, kept: tuple[MigrationRecord, ...]) -> Placement:
        try:
            return self._executions.placement_at(version)
        except SnapshotError as error:
            raise ApiError(
                f"the placement of version {version} is not kept", status=409, remedy=_versions(kept)
            ) from error


def _ids(kept: tuple[MigrationRecord, ...], version: int) -> tuple[str, ...]:
    """Return the migrations that started from this version or later, the newest first."""
    return tuple(each.migration_id for each in reversed(kept) if each.base_version >= version)


def _versions(kept: tuple[MigrationRecord, ...]) -> str:
    ends = sorted({each.base_version for each in kept} - {0})
    newest = "".join(f", {version}" for version in ends[-20:])
    return f"flexd rollback --to VERSION restores one of these versions: 0 (all copies home){newest}"


def _kinds_like(kind: str) -> tuple[str, ...]:
    """Return the kinds of plans that promote or move to any of the tiers of ``kind``."""
    tiers = set(kind.split("+"))
    alike = [each for size in (1, 2, 3) for each in combinations(_TIERS, size) if tiers & set(each)]
    return tuple("+".join(each) for each in alike) or ((kind,) if kind else ())
