"""The files of a state directory: their format versions, checked together before a daemon opens any of them.

Each class that reads a file refuses a newer format by itself too. Checked here, one start names all of them, and none
is opened, changed or replaced.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flexd.config import tables_file
from flexd.control.daemon import journal
from flexd.core.durable import UNUSABLE, sync_directory
from flexd.core.errors import SnapshotError, StateVersionError, UnusableStateError
from flexd.ingest.restore import UNUSABLE_REMEDY
from flexd.operations import state_file
from flexd.stream import offsets_in_work

logger = logging.getLogger("flexd")


@dataclass(frozen=True)
class StateFile:
    """A file of the state directory that has a format version.

    Attributes:
        name: path within the directory.
        side_files: suffixes of files that belong to it.
        check: raises StateVersionError if the file at a path is of a newer format.
    """

    name: str
    check: Callable[[Path], None]
    side_files: tuple[str, ...] = ()


FILES = (
    StateFile("placement/placement.journal", journal.check_version),
    StateFile(state_file.NAME, state_file.check_version, state_file.SIDE_FILES),
    StateFile(tables_file.NAME, tables_file.check_version),
    StateFile(offsets_in_work.RECORD_NAME, offsets_in_work.check_version),
)


def newer_files(state_dir: Path) -> dict[StateFile, str]:
    """Return the files of a newer format, with what is wrong in words."""
    found = {}
    for file in FILES:
        path = state_dir / file.name
        if not path.is_file():
            continue
        try:
            file.check(path)
        except StateVersionError as error:
            found[file] = str(error)
    return found


def check_files(state_dir: Path, *, start_empty: bool) -> None:
    """Check the formats of the state's files.

    Args:
        start_empty: set files of a newer format aside and start without them.

    Raises:
        UnusableStateError: some are of a newer format; nothing has changed.
    """
    found = newer_files(state_dir)
    if found and not start_empty:
        raise UnusableStateError("; ".join(found.values()), remedy=UNUSABLE_REMEDY)
    for file, problem in found.items():
        logger.error("%s: it is now %s%s", problem, file.name, UNUSABLE)
        mark_unusable(state_dir, file)


def mark_unusable(state_dir: Path, file: StateFile) -> None:
    """Rename a file and what belongs to it, so that a start does without it.

    Raises:
        SnapshotError: it cannot be renamed.
    """
    path = state_dir / file.name
    try:
        # The side files first: SQLite would apply a log that stays to the next file of that name.
        for side in (*file.side_files, ""):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{path}{side}").replace(f"{path}{UNUSABLE}{side}")
        sync_directory(path.parent)
    except OSError as error:
        raise SnapshotError(f"{path} cannot be renamed: {error.strerror}", remedy="check its permissions") from error
