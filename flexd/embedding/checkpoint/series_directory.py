"""The directory of a ``CheckpointSeries``: which saves are there, complete, and needed.

A save is written into ``save-N.partial`` and renamed to ``save-N`` when all of it is on the disk; one that goes is
renamed to ``save-N.removing`` before its first file is removed. So ``save-N`` is whole or not there, whenever a job
ends.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flexd.core.errors import CheckpointError

FORMAT = 1
"""Of a save: of its manifest and of its files of rows."""
_MANIFEST = "manifest.json"
_PARTIAL, _REMOVING = ".partial", ".removing"
_NAMED = re.compile(r"save-(\d{8,})")


class _BrokenSave(Exception):
    """A save that cannot be loaded, and why."""


def save_name(number: int) -> str:
    return f"save-{number:08}"


@dataclass(frozen=True)
class SavedFile:
    """Rows that one rank saved.

    Attributes:
        windows: in the file, of each dim-group.
    """

    name: str
    nbytes: int
    rows: int
    windows: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """A save.

    Attributes:
        identity: random, so that a base is not taken for another save of its number.
        base, base_identity: the save whose changes this one has; None: it has all rows.
        steps: optimizer steps.
        tables: fields of each ``TableSpec``, in the order of the collection.
        has_state: whether there is a file of other state.
    """

    number: int
    identity: str
    base: int | None
    base_identity: str | None
    steps: int
    tables: tuple[dict[str, Any], ...]
    files: tuple[SavedFile, ...]
    has_state: bool

    @property
    def name(self) -> str:
        return save_name(self.number)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises ValueError, KeyError or TypeError if it is no manifest of this format."""
        fields = json.loads(text)
        if fields.pop("format") != FORMAT:
            raise ValueError("of another version")
        files = tuple(SavedFile(**{**file, "windows": tuple(file["windows"])}) for file in fields.pop("files"))
        return cls(tables=tuple(fields.pop("tables")), files=files, **fields)


class SeriesDirectory:
    """Saves under one path. Only one rank changes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def numbers(self) -> list[int]:
        """Return the numbers of the complete saves, ascending."""
        return self._numbers("")

    def interrupted(self) -> list[int]:
        """Return the numbers of saves that were begun and not completed, ascending."""
        return self._numbers(_PARTIAL)

    def next_number(self) -> int:
        return 1 + max((number for suffix in ("", _PARTIAL, _REMOVING) for number in self._numbers(suffix)), default=0)

    def chain(self, number: int | None) -> list[Manifest]:
        """Return a save with all that it builds on, the one with all rows first.

        Args:
            number: None: the newest.

        Raises:
            CheckpointError: there is no such save, or one that it builds on is missing.
        """
        try:
            return self._chain(number)
        except _BrokenSave as broken:
            whole = []
            for other in self.numbers():
                with suppress(_BrokenSave):
                    self._chain(other)
                    whole.append(save_name(other))
            remedy = f"load one of {', '.join(whole)}" if whole else "load a checkpoint of another directory"
            raise CheckpointError(str(broken), remedy=remedy) from broken.__cause__

    def begin(self, number: int) -> Path:
        """Make the directory of a save that is to be written, and remove what ended jobs have left."""
        self.path.mkdir(parents=True, exist_ok=True)
        for suffix in (_PARTIAL, _REMOVING):
            for left in self._numbers(suffix):
                shutil.rmtree(self.path / f"{save_name(left)}{suffix}")
        partial = self.partial(number)
        partial.mkdir()
        return partial

    def partial(self, number: int) -> Path:
        return self.path / f"{save_name(number)}{_PARTIAL}"

    def complete(self, manifest: Manifest) -> None:
        """Let a save that is written whole be one."""
        partial = self.partial(manifest.number)
        with (partial / _MANIFEST).open("x") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        _sync(partial)
        partial.rename(self.path / manifest.name)
        _sync(self.path)

    def rotate(self, keep: int) -> None:
        """Remove all saves but the newest ``keep`` and those that these build on."""
        present = self.numbers()
        needed: set[int] = set()
        for number in present[-keep:]:
            needed.update(manifest.number for manifest in self.chain(number))
        gone = [number for number in present if number not in needed]
        for number in reversed(gone):
            removing = self.path / f"{save_name(number)}{_REMOVING}"
            (self.path / save_name(number)).rename(removing)
            shutil.rmtree(removing)

    def _manifest(self, number: int) -> Manifest:
        path = self.path / save_name(number) / _MANIFEST
        try:
            return Manifest.from_json(path.read_text())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _BrokenSave(f"{path} cannot be read ({type(error).__name__}: {error})") from error

    def _chain(self, number: int | None) -> list[Manifest]:
        present = self.numbers()
        if not present or (number is not None and number not in present):
            wanted = "complete checkpoint" if number is None else f"complete {save_name(number)}"
            began = "".join(f"; {save_name(n)} was being written when its job ended" for n in self.interrupted())
            raise _BrokenSave(f"{self.path} has no {wanted}{began}")
        found = [self._manifest(present[-1] if number is None else number)]
        while (base := found[-1].base) is not None:
            needs = f"{self.path / found[0].name} needs {save_name(base)}"
            if base not in present:
                raise _BrokenSave(f"{needs}, which is not there: it was rotated away or removed")
            below = self._manifest(base)
            if below.identity != found[-1].base_identity:
                raise _BrokenSave(f"{needs}, and the one that is there is another")
            found.append(below)
        return found[::-1]

    def _numbers(self, suffix: str) -> list[int]:
        if not self.path.is_dir():
            return []
        found = (
            _NAMED.fullmatch(entry.name.removesuffix(suffix))
            for entry in self.path.iterdir()
            if entry.name.endswith(suffix)
        )
        return sorted(int(name[1]) for name in found if name)


def _sync(directory: Path) -> None:
    """Write the names in a directory to the disk."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
