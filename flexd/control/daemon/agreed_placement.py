"""The placement that all ranks have agreed on, and the journal that can tell what it is."""

from __future__ import annotations

import threading

from flexd.control.daemon.journal import PlacementJournal, Segment
from flexd.core.errors import SnapshotError
from flexd.core.fault_points import fault_point
from flexd.core.placement import Placement


class AgreedPlacement:
    """``placement`` and ``version`` may be read from any thread; the rest belongs to the coordinator's.

    Before any rank is live it is the newest placement of the journal.
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
        """Goes on from what the ranks of ``segment`` agreed on; False if the journal cannot tell what that is.

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
        self.adopt(placement, segment)
        return True

    def adopt(self, placement: Placement, segment: Segment) -> None:
        """Goes on from this placement, durably. Raises SnapshotError if the journal cannot be written."""
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
        """All ranks hold ``version`` for certain.

        Raises:
            SnapshotError: the journal could not be folded; it stays as it was, and so does this otherwise.
        """
        if version <= self._version:
            return
        with self._lock:
            self._version = version
            fault_point("chunk.agreed")
            self._journal.note_agreed(version)
