"""A save of a series that a thread writes while training goes on: its rows are copied before.

The thread uses no process group, because collectives of training must not wait for it: ranks leave a note of what they
have written in the directory of the save, which all of them can access, and rank 0's thread makes the save complete
when all notes are there.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from flexd.core.errors import CheckpointError
from flexd.embedding.checkpoint.saved_rows import (
    Manifest,
    RowWindow,
    SavedFile,
    SeriesDirectory,
    rank_file,
    write_durably,
    write_windows,
)

logger = logging.getLogger(__name__)

STATE_FILE = "state.pt"
"""Of a save: what rank 0 gave beside the rows."""
_POLL_SECONDS = 0.1


class BackgroundSave:
    """A save that is being written. ``start`` it once; its other methods are called by the training thread.

    Args:
        windows: copies of this rank's rows, of so many ``groups`` as ``write_windows`` has.
        state: content of the file of other state; None: no file.
        manifest: makes the manifest from the files of all ranks; used on rank 0.
        keep: number of saves that are kept.
        timeout_seconds: for the other ranks, after rank 0 has written its part.
    """

    def __init__(
        self,
        directory: SeriesDirectory,
        number: int,
        rank: int,
        world_size: int,
        windows: Sequence[RowWindow],
        groups: int,
        state: bytes | None,
        manifest: Callable[[tuple[SavedFile, ...]], Manifest],
        keep: int,
        timeout_seconds: float,
    ) -> None:
        self.number = number
        self.error = ""
        """Why this rank could not write; empty if it could, or has not ended."""
        self._directory, self._partial = directory, directory.partial(number)
        self._rank, self._world_size = rank, world_size
        self._windows: Sequence[RowWindow] = windows
        self._groups, self._state, self._manifest = groups, state, manifest
        self._keep, self._timeout_seconds = keep, timeout_seconds
        self._written, self._given_up = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="flexd-background-save", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_written(self, timeout_seconds: float) -> bool:
        """Wait until this rank has written its part or failed; return whether it has."""
        return self._written.wait(timeout_seconds)

    def give_up(self) -> None:
        """Let rank 0 wait for no more ranks: one has failed."""
        self._given_up.set()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end of the thread, which on rank 0 makes the save complete; return whether it has ended."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._write()
            self._written.set()
            if self._rank == 0:
                self._complete()
        except OSError as error:
            self.error = f"cannot write {self._partial}: {error.strerror or error}"
        except CheckpointError as error:
            self.error = error.message
        except Exception as error:
            self.error = f"cannot write {self._partial}: {type(error).__name__}: {error}"
        finally:
            self._windows = ()
            self._written.set()

    def _write(self) -> None:
        name = rank_file(self._rank)
        saved = write_windows(self._partial / name, self._windows, self._groups)
        if self._state is not None:
            write_durably(self._partial / STATE_FILE, self._state)
        note = self._note(self._rank)
        unnamed = note.with_suffix(".writing")
        unnamed.write_text(json.dumps(asdict(saved)))
        unnamed.rename(note)

    def _complete(self) -> None:
        notes = [self._note(rank) for rank in range(self._world_size)]
        deadline = time.monotonic() + self._timeout_seconds
        while missing := [rank for rank, note in enumerate(notes) if not note.exists()]:
            if self._given_up.wait(_POLL_SECONDS) or time.monotonic() > deadline:
                raise CheckpointError(
                    f"{self._partial}: ranks {missing} have not written their rows", remedy="see their errors"
                )
        files = [json.loads(note.read_text()) for note in notes]
        for note in notes:
            note.unlink()
        self._directory.complete(
            self._manifest(tuple(SavedFile(**{**file, "windows": tuple(file["windows"])}) for file in files))
        )
        self._directory.rotate_or_warn(self._keep)

    def _note(self, rank: int) -> Path:
        return self._partial / f"rank{rank}.written"
