"""Saves of a series: their directory, and the home rows of a rank in their files, written and read window by window.

A rank writes its own rows, so saving exchanges nothing; when they are loaded each file is read by one rank, which sends
the rows of a window to their homes. So neither needs more memory than a window, and rows in slow memory stay there. A
window says which keys its rows have and has a checksum, so damage is found before a row is used.

A save is written into ``save-N.partial`` and renamed to ``save-N`` when all of it is on the disk; one that goes is
renamed to ``save-N.removing`` before its first file is removed. So ``save-N`` is whole or not there, whenever a job
ends.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import struct
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from flexd.core.arrays import Int64Array
from flexd.core.errors import CheckpointError
from flexd.core.keyspace import NO_KEY
from flexd.embedding.checkpoint import table_rows
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.store.store import GroupStore

if TYPE_CHECKING:
    from flexd.embedding.checkpoint.changed_rows import HomeRows

logger = logging.getLogger(__name__)

FORMAT = 1
"""Of a save: of its manifest and of its files of rows."""
_MANIFEST = "manifest.json"
_PARTIAL, _REMOVING = ".partial", ".removing"
_OTHER_DIRECTORY = "load a checkpoint of another directory"
_NAMED = re.compile(r"save-(\d{8,})")


def save_name(number: int) -> str:
    return f"save-{number:08}"


@dataclass(frozen=True)
class SavedFile:
    """Rows that one rank saved.

    Attributes:
        windows: in the file, of each dim-group, and then of each table of unbounded ids, which come first in it.
    """

    name: str
    nbytes: int
    rows: int
    windows: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """A save, with all of its ranks' files.

    Attributes:
        number: from 1; ``CheckpointSeries.load(number)`` loads it.
        identity: random, so that a base is not taken for another save of its number.
        base, base_identity: the save whose changes this one has; None: it has all rows.
        steps: optimizer steps.
        tables: fields of each ``TableSpec`` and others, in the order of the collection.
        has_state: whether there is a file of other state.
        ids: ``UnboundedIds.progress``; None without unbounded ids.
    """

    number: int
    identity: str
    base: int | None
    base_identity: str | None
    steps: int
    tables: tuple[dict[str, Any], ...]
    files: tuple[SavedFile, ...]
    has_state: bool
    ids: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return save_name(self.number)

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

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
        except CheckpointError as broken:
            whole = []
            for other in self.numbers():
                with suppress(CheckpointError):
                    self._chain(other)
                    whole.append(save_name(other))
            if not whole:
                raise
            raise CheckpointError(broken.message, remedy=f"load one of {', '.join(whole)}") from broken

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
        fields = {"format": FORMAT, **asdict(manifest)}
        if manifest.ids is None:  # as releases wrote it that did not know unbounded ids
            del fields["ids"]
        with (partial / _MANIFEST).open("x") as file:
            file.write(json.dumps(fields))
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

    def rotate_or_warn(self, keep: int) -> None:
        """As ``rotate``; saves that cannot be removed stay, with a warning."""
        try:
            self.rotate(keep)
        except (OSError, CheckpointError) as error:
            logger.warning("old checkpoints of %s stay: %s", self.path, error)

    def manifest(self, number: int) -> Manifest:
        path = self.path / save_name(number) / _MANIFEST
        try:
            return Manifest.from_json(path.read_text())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({type(error).__name__}: {error})", remedy=_OTHER_DIRECTORY
            ) from error

    def _chain(self, number: int | None) -> list[Manifest]:
        present = self.numbers()
        if not present or (number is not None and number not in present):
            wanted = "complete checkpoint" if number is None else f"complete {save_name(number)}"
            began = "".join(f"; {save_name(n)} was being written when its job ended" for n in self.interrupted())
            raise CheckpointError(f"{self.path} has no {wanted}{began}", remedy=_OTHER_DIRECTORY)
        found = [self.manifest(present[-1] if number is None else number)]
        while (base := found[-1].base) is not None:
            needs = f"{self.path / found[0].name} needs {save_name(base)}"
            if base not in present:
                raise CheckpointError(
                    f"{needs}, which is not there: it was rotated away or removed", remedy=_OTHER_DIRECTORY
                )
            below = self.manifest(base)
            if below.identity != found[-1].base_identity:
                raise CheckpointError(f"{needs}, and the one that is there is another", remedy=_OTHER_DIRECTORY)
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


KEY_BYTES = 8
_HEADER = struct.Struct("<8sHHIQQqIII12x")
_MARK = b"flexrows"
_SLOT_TYPES = {0: None, 4: np.dtype("<u4"), 8: np.dtype("<i8")}
_DAMAGED = "load an earlier checkpoint"


@dataclass(frozen=True)
class RowWindow:
    """Rows of one dim-group, or the sets of slots of one table of unbounded ids.

    Attributes:
        group: number of the dim-group in the job that saved, or of the table behind them (``SavedFile.windows``).
        first_key, key_step: the row in slot s has key ``first_key + key_step * s``.
        slots: int64 [n], ascending.
        packed: uint8 [n, bytes of a row and its state], or of a set.
    """

    group: int
    first_key: int
    key_step: int
    slots: Int64Array
    packed: npt.NDArray[np.uint8]


def write_window(file: BinaryIO, window: RowWindow) -> int:
    """Write a window behind those before; return its bytes."""
    slots, count = window.slots, len(window.slots)
    slot_bytes = 4 if int(slots[-1]) < 2**32 else 8
    if int(slots[-1]) - int(slots[0]) + 1 == count:
        slot_bytes = 0  # consecutive: the first says it all
    of_slots = _SLOT_TYPES[slot_bytes]
    listed = b"" if of_slots is None else slots.astype(of_slots).tobytes()
    packed = np.ascontiguousarray(window.packed)
    fields = (
        _MARK, FORMAT, slot_bytes, window.group, count, int(slots[0]), window.first_key, window.key_step,
        packed.shape[1],
    )  # fmt: skip
    checksum = zlib.crc32(packed.data, zlib.crc32(listed, zlib.crc32(_HEADER.pack(*fields, 0))))
    for piece in (_HEADER.pack(*fields, checksum), listed, packed.data):
        file.write(piece)
    return _HEADER.size + len(listed) + packed.nbytes


def read_windows(path: Path) -> Generator[RowWindow]:
    """Yield the windows of a file in their order.

    Raises:
        CheckpointError: the file cannot be read, or is not what was written.
    """
    try:
        with path.open("rb") as file:
            left = os.fstat(file.fileno()).st_size
            while left:
                window, size = _read_window(path, file, left)
                left -= size
                yield window
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}", remedy=_DAMAGED) from error


def _read_window(path: Path, file: BinaryIO, left: int) -> tuple[RowWindow, int]:
    """Return the next window and its bytes, of so many that are left of the file."""

    def exactly(count: int) -> bytearray:
        # Damaged lengths must not allocate: what is there is known.
        found = bytearray(count if count <= left else 0)
        if count > left or file.readinto(found) != count:  # type: ignore[attr-defined]
            raise CheckpointError(f"{path} ends too early", remedy=_DAMAGED)
        return found

    fields = _HEADER.unpack(exactly(_HEADER.size))
    mark, found_format, slot_bytes, group, count, first, first_key, key_step, row_bytes, checksum = fields
    if mark != _MARK or found_format != FORMAT or slot_bytes not in _SLOT_TYPES:
        raise CheckpointError(f"{path} is no file of rows of this version", remedy=_DAMAGED)
    listed = exactly(slot_bytes * count)
    packed = np.frombuffer(exactly(row_bytes * count), dtype=np.uint8).reshape(count, row_bytes)
    if zlib.crc32(packed.data, zlib.crc32(listed, zlib.crc32(_HEADER.pack(*fields[:-1], 0)))) != checksum:
        raise CheckpointError(f"{path} has rows that differ from the saved ones (checksum)", remedy=_DAMAGED)
    of_slots = _SLOT_TYPES[slot_bytes]
    slots = np.arange(first, first + count, dtype=np.int64)
    if of_slots is not None:
        slots = np.frombuffer(listed, dtype=of_slots).astype(np.int64)
    window = RowWindow(group, first_key, key_step, slots, packed)
    return window, _HEADER.size + len(listed) + packed.nbytes


def windows_of(stores: Sequence[GroupStore], rows: HomeRows) -> Iterator[RowWindow]:
    """Yield copies of home rows of this rank, with their state, in host memory.

    Raises:
        SlowMemoryError: rows cannot be read.
    """
    for group, store in enumerate(stores):
        most = max(1, table_rows.MAX_WINDOW_BYTES // (KEY_BYTES + store.row_bytes))
        for slots in rows.slots(group, most):
            window = _window(store, group, slots)
            if len(window.slots):
                yield window


def write_windows(path: Path, windows: Iterable[RowWindow], groups: int) -> SavedFile:
    """Write windows of so many dim-groups and tables of unbounded ids into a new file, which is on the disk then.

    Raises:
        OSError: the file exists or cannot be written.
    """
    counts = [0] * groups
    nbytes = written = 0
    with path.open("xb") as file:
        for window in windows:
            nbytes += write_window(file, window)
            written += len(window.slots)
            counts[window.group] += 1
        file.flush()
        os.fsync(file.fileno())
    return SavedFile(path.name, nbytes, written, tuple(counts))


def write_durably(path: Path, content: bytes | memoryview) -> None:
    """Write a new file, which is on the disk then."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _window(store: GroupStore, group: int, slots: torch.Tensor) -> RowWindow:
    """Return the rows in int64 [n] ascending home slots, without those of slots that have no row."""
    first, step = store.first_home_address, store.world_size
    order = slots
    if not store.homes.linear:
        keys, order = store.keys_at(slots).sort()
        used = keys != NO_KEY
        slots, order, first, step = slots.index_select(0, order[used]), keys[used], 0, 1
    return RowWindow(group, first, step, order.cpu().numpy(), store.read_homes(slots).cpu().numpy())


def check_files(directory: Path, files: Sequence[SavedFile]) -> None:
    """Read files whole, so that nothing is changed by a save that is damaged.

    Raises:
        CheckpointError: a file is missing, or differs from the saved one.
    """
    for file in files:
        windows = [0] * len(file.windows)
        rows = 0
        for window in read_windows(directory / file.name):
            rows += len(window.slots)
            windows[window.group] += 1
        if rows != file.rows or tuple(windows) != file.windows:
            raise CheckpointError(
                f"{directory / file.name} has {rows} rows, and {file.rows} were saved", remedy=_DAMAGED
            )


def gathered_files(world: Peers, mine: SavedFile, device: torch.device) -> tuple[SavedFile, ...]:
    """Collective. Return the files of all ranks, which are named by ``rank_file``."""
    numbers = torch.tensor([mine.nbytes, mine.rows, *mine.windows], dtype=torch.int64, device=device)
    found = np.asarray(world.all_gather(numbers).tolist(), dtype=np.int64)
    return tuple(
        SavedFile(rank_file(rank), int(of_rank[0]), int(of_rank[1]), tuple(of_rank[2:].tolist()))
        for rank, of_rank in enumerate(found)
    )


def rank_file(rank: int) -> str:
    return f"rank{rank}.rows"
