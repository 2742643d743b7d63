"""The placement that all ranks have agreed on, stored in the journal."""

from __future__ import annotations

import threading

from flexd.control.daemon.journal import PlacementJournal, Segment
from flexd.core.errors import SnapshotError
from flexd.core.fault_points import fault_point
from flexd.core.placement import Placement


class AgreedPlacement:
    """Holds the agreed placement: before any rank is live, the newest placement of the journal.

    Any thread may read ``placement`` and ``version``; the rest belongs to the coordinator's thread.
    """

    def __init__(self, journal: PlacementJournal) -> None:
        self._journal = journal
        self._lock = threading.Lock()
        self._version = journal.last_version
        self._placement = journal.placement_at(self._version)

    @property
    def version(self) -> int:
        return self._version

    @property
    def placement(self) -> Placement:
        with self._lock:
            if self._placement.version != self._version:
                self._placement = self._journal.placement_at(self._version)
            return self._placement

    def continue_from(self, version: int, digest: int, segment: Segment) -> bool:
        """Continue from the version that the ranks of ``segment`` agreed on; False if the journal does not have it.

        Raises:
            SnapshotError: the journal cannot be written.
        """
        try:
            placement = self._journal.placement_at(version)
        except SnapshotError:
            placement = Placement.empty(version)
        if placement.digest() != digest and version == 0:
            placement = Placement.empty()
        if placement.digest() != digest:
            return False
        self.restart_from(placement, segment)
        return True

    def restart_from(self, placement: Placement, segment: Segment) -> None:
        """Continue from this placement, durably. Raises SnapshotError if the journal cannot be written."""
        try:
            known = (
                self._journal.segment == segment
                and self._journal.placement_at(placement.version).digest() == placement.digest()
            )
        except SnapshotError:
            known = False
        if not known:
            self._journal.begin(segment, placement)
        with self._lock:
            self._placement, self._version = placement, placement.version

    def advance(self, version: int) -> None:
        """Record that all ranks hold ``version``.

        Raises:
            SnapshotError: the journal could not be compacted; nothing else is lost.
        """
        if version <= self._version:
            return
        with self._lock:
            self._version = version
            fault_point("chunk.agreed")
            self._journal.compact(version)
