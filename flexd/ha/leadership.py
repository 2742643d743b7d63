"""In whose name a daemon acts: its term, how long it may, and the directory that is its own."""

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
    """Attributes:
    state_dir: where this daemon, and no other one, writes.
    term: the fencing number that ranks are told; 0 without a lease.
    holds: whether it may act now; cheap, any thread. False for good once it was false.
    """

    state_dir: Path
    term: int = 0
    holds: Callable[[], bool] = _always


def without_lease(config: Config) -> Leadership:
    """Of a daemon without a lease. Raises SnapshotError if daemons with one have left their state there."""
    directory = config.state.dir
    term = highest_term(directory)
    if term:
        raise SnapshotError(
            f"state.dir: {directory} has the state of daemons with a lease, the newest in term-{term:010d}",
            remedy="set high_availability.lease, or move what is in that directory to state.dir and remove all of them",
        )
    return Leadership(directory)


class FencedSnapshotStore(SnapshotStore):
    """Snapshots that count only if they were complete while the lease was held.

    Whoever takes over starts from what is there then. A snapshot that was completed later is not among it, so the
    stream must not be told that it exists: what it had counted will be counted again, by the new leader.
    """

    def __init__(self, directory: Path, keep: int, holds: Callable[[], bool]) -> None:
        super().__init__(directory, keep)
        self._holds = holds

    def save(self, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Path:
        """Raises SnapshotError as ``SnapshotStore.save``, or if the lease is lost before the snapshot is durable."""
        self._check("is not written")
        path = super().save(meta, arrays)
        self._check("does not count")
        return path

    def _check(self, what: str) -> None:
        if not self._holds():
            raise SnapshotError(f"the snapshot {what}: this daemon leads no more", remedy="the new leader has its own")
