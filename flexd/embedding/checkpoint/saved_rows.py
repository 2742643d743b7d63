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
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from flexd.core.arrays import Int64Array
from flexd.core.errors import CheckpointError
from flexd.core.keyspace import NO_KEY, KeySpace, TableSpec
from flexd.core.sharding_types import ROW_WISE
from flexd.embedding import devices
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
        windows: in the file, of each dim-group.
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
        with (partial / _MANIFEST).open("x") as file:
            file.write(json.dumps({"format": FORMAT, **asdict(manifest)}))
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


_KEY_BYTES = 8
_HEADER = struct.Struct("<8sHHIQQqIII12x")
_MARK = b"flexrows"
_SLOT_TYPES = {0: None, 4: np.dtype("<u4"), 8: np.dtype("<i8")}
_DAMAGED = "load an earlier checkpoint"

ChangedTablesOption = Literal["init", "error"]
_OTHER_TABLES = "construct the collection with the tables and optimizer of the checkpoint"
_USE_INIT = (
    ', or load with changed_tables="init": tables and rows that the checkpoint lacks begin from their seed, and tables '
    "that the collection lacks are left out"
)


@dataclass(frozen=True)
class RowWindow:
    """Rows of one dim-group.

    Attributes:
        group: number of the dim-group in the job that saved.
        first_key, key_step: the row in slot s has key ``first_key + key_step * s``.
        slots: int64 [n], ascending.
        packed: uint8 [n, bytes of a row and its state].
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
        most = max(1, table_rows.MAX_WINDOW_BYTES // (_KEY_BYTES + store.row_bytes))
        for slots in rows.slots(group, most):
            window = _window(store, group, slots)
            if len(window.slots):
                yield window


def write_windows(path: Path, windows: Iterable[RowWindow], groups: int) -> SavedFile:
    """Write windows of so many dim-groups into a new file, which is on the disk then.

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


class SavedTables:
    """The tables of a save and where they are in this job, which may have them in another order.

    Args:
        tables: ``Manifest.tables``.
    """

    def __init__(self, tables: Sequence[dict[str, Any]], keyspace: KeySpace) -> None:
        read_only = [table["name"] for table in tables if table.get("read_only")]
        specs = [TableSpec(**{name: table[name] for name in table if name != "read_only"}) for table in tables]
        self.saved, self._keyspace = KeySpace(specs, read_only), keyspace

    def check(self, changed_tables: ChangedTablesOption) -> list[str]:
        """Return the differences between the tables of the save and those of this job.

        Raises:
            CheckpointError: there are some, and ``changed_tables`` is "error", or rows of the save do not fit.
        """
        here = {table.name: replace(table, sharding=ROW_WISE) for table in self._keyspace.tables}  # as every save
        there = {table.name: table for table in self.saved.tables}
        changes = [f"table {name!r} is missing in the checkpoint" for name in here if name not in there]
        changes += [f"table {name!r} is unknown to the collection" for name in there if name not in here]
        refused = [] if here.keys() & there.keys() else ["no table of the checkpoint is in the collection"]
        for name, table in here.items():
            if name in there and there[name] != table:
                enlarged = replace(there[name], rows=table.rows) == table and table.rows > there[name].rows
                (changes if enlarged else refused).append(
                    f"table {name!r} is {_text(there[name])} in the checkpoint and {_text(table)} in the collection"
                )
        if changed_tables not in get_args(ChangedTablesOption):
            refused.append(f"changed_tables={changed_tables!r}, which is not 'init' or 'error'")
        if refused or (changes and changed_tables == "error"):
            raise CheckpointError("; ".join(refused + changes), remedy=_OTHER_TABLES + ("" if refused else _USE_INIT))
        return changes

    @property
    def left_out(self) -> list[str]:
        """Tables that were trained in the save and are read only in this job: their optimizer state is left out."""
        return sorted((self._keyspace.read_only - self.saved.read_only) & self.saved.index.keys())

    @property
    def begun(self) -> list[str]:
        """Tables that were read only in the save and are trained in this job: their optimizer state begins anew."""
        return sorted((self.saved.read_only - self._keyspace.read_only) & self._keyspace.index.keys())

    def groups(self, saved_group: int) -> list[int]:
        """Return the dim-groups of this job that have the tables of one of the save: several if other tables are read
        only here, none if it has none of the tables."""
        names = [self.saved.tables[table].name for table in self.saved.groups[saved_group].tables]
        here = [self._keyspace.index[name] for name in names if name in self._keyspace.index]
        return sorted({int(self._keyspace.group_of_table[table]) for table in here})

    def keys(self, keys: Int64Array) -> Int64Array:
        """int64 [n] keys of the save -> int64 [n] keys of this job, ``NO_KEY`` for rows of tables that it lacks."""
        tables, rows = self.saved.table_rows(keys)
        index = self._keyspace.index
        kept = np.array([table.name in index for table in self.saved.tables])
        here = np.array([self._keyspace.first_key[index.get(table.name, 0)] for table in self.saved.tables])
        return np.where(kept[tables], here[tables] + rows, NO_KEY)


def load_rows_of(
    directory: Path, manifest: Manifest, tables: SavedTables, world: Peers, stores: Sequence[GroupStore]
) -> None:
    """Collective. Write the rows of a save to their homes. Optimizer state that the save or this job lacks is 0 or left
    out.

    Raises:
        CheckpointError: a file cannot be read. Rows may have been replaced then.
    """
    device, keyspace = stores[0].rows.device, stores[0].homes.homes.keyspace
    mine = manifest.files[world.index :: world.size]
    with ExitStack() as opened:
        readers = [opened.enter_context(closing(read_windows(directory / file.name))) for file in mine]
        for saved_group in range(len(tables.saved.groups)):
            windows = (
                window
                for reader, file in zip(readers, mine, strict=True)
                for window in islice(reader, file.windows[saved_group])
            )
            if not (groups := tables.groups(saved_group)):
                for _ in windows:  # what follows in the files is read from there on
                    pass
                continue
            row_bytes = stores[groups[0]].row_bytes
            rounds = torch.tensor([sum(file.windows[saved_group] for file in mine)], device=device)
            world.all_reduce(rounds, dist.ReduceOp.MAX)
            for _ in range(int(rounds)):
                window = next(windows, None)
                keys = np.empty(0, dtype=np.int64)
                packed = torch.empty((0, row_bytes), dtype=torch.uint8, device=device)
                if window is not None:
                    keys = tables.keys(window.slots * window.key_step + window.first_key)
                    packed = torch.from_numpy(window.packed).to(device)
                of_row = keyspace.group_of(keys)  # -1 for rows of tables that this job lacks
                for group in groups:
                    store, own = stores[group], np.flatnonzero(of_row == group)
                    addresses = store.homes.addresses(torch.from_numpy(keys[own]).to(device))
                    rows = store.fitted(packed[torch.from_numpy(own).to(device)], 0.0)
                    _send_home(world, store, addresses, rows)


def _send_home(world: Peers, store: GroupStore, addresses: torch.Tensor, packed: torch.Tensor) -> None:
    """Collective. Write the uint8 [n, row_bytes] rows of int64 [n] addresses at their homes.

    The windows of all ranks may have one home, that of a whole table: rows travel in so many parts that no rank
    receives much more than a window at once.
    """
    width = _KEY_BYTES + store.row_bytes
    homes = addresses % world.size
    arriving = torch.bincount(homes, minlength=world.size)
    world.all_reduce(arriving)
    parts = max(1, -(-int(arriving.max()) * width // table_rows.MAX_WINDOW_BYTES))
    joined = torch.cat([addresses.view(-1, 1).view(torch.uint8), packed], dim=1)
    places = torch.arange(len(addresses), device=addresses.device)
    for part in range(parts):
        of_part = places[part::parts]
        order, counts = devices.ordered(homes.index_select(0, of_part), world.size)
        received_counts = world.all_to_all(counts, [1] * world.size, [1] * world.size).tolist()
        received = world.all_to_all(
            joined.index_select(0, of_part.index_select(0, order)).view(-1),
            [count * width for count in counts.tolist()], [count * width for count in received_counts],
        ).view(-1, width)  # fmt: skip
        slots = store.home_slots(received[:, :_KEY_BYTES].clone().view(torch.int64).view(-1))
        store.write_homes(received[:, _KEY_BYTES:], slots)


def _text(table: TableSpec) -> str:
    return f"{table.rows} x {table.dim} {table.dtype} with {table.optimizer}"


def table_fields(keyspace: KeySpace) -> tuple[dict[str, Any], ...]:
    """Return ``Manifest.tables`` of this job."""
    return tuple(
        {"name": t.name, "rows": t.rows, "dim": t.dim, "dtype": t.dtype, "optimizer": t.optimizer}
        | ({"read_only": True} if t.name in keyspace.read_only else {})
        for t in keyspace.tables
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
