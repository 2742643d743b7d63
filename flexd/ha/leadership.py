"""Leadership of a daemon: its term, whether it still holds, and its state directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from flexd.config.model import Config
from flexd.core.errors import SnapshotError
from flexd.ha.term_directories import highest_term
from flexd.sketch.snapshot import SnapshotStore


def _always() -> bool:
    return True


@dataclass(frozen=True)
class Leadership:
    """The leadership of one daemon for one term.

    Attributes:
        state_dir: directory that only this daemon writes.
        term: fencing number that the ranks receive; 0 without a lease.
        holds: returns whether the daemon may act now; cheap, from any thread. Once False it stays False.
    """

    state_dir: Path
    term: int = 0
    holds: Callable[[], bool] = _always


def without_lease(config: Config) -> Leadership:
    """Return the leadership of a daemon without a lease. Raises SnapshotError if the directory has state of terms."""
    directory = config.state.dir
    term = highest_term(directory)
    if term:
        raise SnapshotError(
            f"state.dir: {directory} has the state of daemons with a lease, the newest in term-{term:010d}",
            remedy="set high_availability.lease, or move what is in that directory to state.dir and remove all of them",
        )
    return Leadership(directory)


class FencedSnapshotStore(SnapshotStore):
    """A snapshot store whose snapshots count only if they were complete while the lease was held.

    A new leader starts from the snapshots that exist when it takes over. A later one is not among them, so its stream
    positions must not be committed: the new leader counts these messages again.
    """

    def __init__(self, directory: Path, keep: int, holds: Callable[[], bool]) -> None:
        super().__init__(directory, keep)
        self._holds = holds

    def save(self, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Path:
        """Save a snapshot. Raises SnapshotError also if the lease is lost before the snapshot is durable."""
        self._check("is not written")
        path = super().save(meta, arrays)
        self._check("does not count")
        return path

    def _check(self, what: str) -> None:
        if not self._holds():
            raise SnapshotError(
                f"the snapshot {what}: this daemon no longer leads", remedy="the new leader has its own"
            )
