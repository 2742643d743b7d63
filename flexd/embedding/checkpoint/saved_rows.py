"""Write the home rows of a rank window by window, and bring saved windows to the homes of their rows.

A rank writes its own rows, so saving exchanges nothing; when they are loaded each file is read by one rank, which sends
the rows of a window to their homes. So neither needs more memory than a window, and rows in slow memory stay there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from flexd.core.errors import CheckpointError
from flexd.core.homes import NO_KEY
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.sharding_types import ROW_WISE
from flexd.embedding import devices
from flexd.embedding.checkpoint import blocks
from flexd.embedding.checkpoint.changed_rows import DrainedRows
from flexd.embedding.checkpoint.row_files import RowFileReader, RowFileWriter, RowWindow
from flexd.embedding.checkpoint.series_directory import Manifest, SavedFile
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.store.store import GroupStore

_KEY_BYTES = 8


def write_rows(path: Path, stores: Sequence[GroupStore], rows: DrainedRows) -> SavedFile:
    """Write home rows of this rank, with their state, into a new file.

    Raises:
        OSError: the file exists or cannot be written.
        SlowMemoryError: rows cannot be read.
    """
    writer = RowFileWriter(path)
    windows = [0] * len(stores)
    try:
        for group, store in enumerate(stores):
            for slots in rows.slots(group, _window_rows(store)):
                window = _window(store, group, slots)
                if len(window.slots):
                    writer.write(window)
                    windows[group] += 1
        writer.close()
    finally:
        writer.abandon()
    return SavedFile(path.name, writer.nbytes, writer.rows, tuple(windows))


def _window(store: GroupStore, group: int, slots: torch.Tensor) -> RowWindow:
    """Return the rows in int64 [n] ascending home slots, without those of slots that have no row."""
    first, step = store.first_home_address, store.world_size
    order = slots
    if store.homes is not None and not store.homes.linear:
        keys, order = store.home_keys_at(slots).sort()
        used = keys != NO_KEY
        slots, order, first, step = slots.index_select(0, order[used]), keys[used], 0, 1
    packed = store.tier.read_through(slots) if store.tier is not None else store.pack(slots)
    return RowWindow(group, first, step, order.cpu().numpy(), packed.cpu().numpy())


def check_files(directory: Path, files: Sequence[SavedFile]) -> None:
    """Read files whole, so that nothing is changed by a save that is damaged.

    Raises:
        CheckpointError: a file is missing, or differs from the saved one.
    """
    for file in files:
        with RowFileReader(directory / file.name) as reader:
            windows = [0] * len(file.windows)
            rows = 0
            while (window := reader.read()) is not None:
                rows += len(window.slots)
                windows[window.group] += 1
        if rows != file.rows or tuple(windows) != file.windows:
            raise CheckpointError(
                f"{directory / file.name} has {rows} rows, and {file.rows} were saved",
                remedy="load an earlier checkpoint",
            )


class SavedTables:
    """The tables of a save and where they are in this job, which may have them in another order.

    Args:
        tables: ``Manifest.tables``.
    """

    def __init__(self, tables: Sequence[dict[str, Any]], keyspace: KeySpace) -> None:
        self._saved = KeySpace([TableSpec(**table) for table in tables])
        self._keyspace = keyspace

    @property
    def groups(self) -> int:
        """Dim-groups of the save."""
        return len(self._saved.groups)

    def differences(self) -> list[str]:
        """Return how the tables of the save differ from those of this job."""
        here = {table.name: replace(table, sharding=ROW_WISE) for table in self._keyspace.tables}  # as every save
        there = {table.name: table for table in self._saved.tables}
        found = [f"table {name!r} is missing" for name in here if name not in there]
        found += [f"table {name!r} is unknown to the collection" for name in there if name not in here]
        return found + [
            f"table {name!r} is {_text(there[name])} in the checkpoint and {_text(table)} in the collection"
            for name, table in here.items()
            if name in there and there[name] != table
        ]

    def group(self, saved_group: int) -> int:
        """Return the number of a dim-group of the save in this job."""
        name = self._saved.tables[self._saved.groups[saved_group].tables[0]].name
        table = self._keyspace.index[name]
        return next(number for number, group in enumerate(self._keyspace.groups) if table in group.tables)

    def keys(self, saved_group: int, keys: torch.Tensor) -> torch.Tensor:
        """int64 [n] keys of a dim-group of the save -> int64 [n] keys of this job."""
        tables = self._saved.groups[saved_group].tables
        firsts = [int(self._saved.first_key[table]) for table in tables]
        shifts = [
            int(self._keyspace.first_key[self._keyspace.index[self._saved.tables[table].name]]) - first
            for table, first in zip(tables, firsts, strict=True)
        ]
        if not any(shifts):
            return keys
        at = torch.searchsorted(torch.tensor(firsts, device=keys.device), keys, right=True) - 1
        return keys + torch.tensor(shifts, device=keys.device).index_select(0, at)


def load_rows_of(
    directory: Path, manifest: Manifest, tables: SavedTables, world: Peers, stores: Sequence[GroupStore]
) -> None:
    """Collective. Write the rows of a save to their homes.

    Raises:
        CheckpointError: a file cannot be read. Rows may have been replaced then.
    """
    device = stores[0].rows.device
    mine = manifest.files[world.index :: world.size]
    with ExitStack() as opened:
        readers = [opened.enter_context(RowFileReader(directory / file.name)) for file in mine]
        for saved_group in range(tables.groups):
            store = stores[tables.group(saved_group)]
            windows = (
                window
                for reader, file in zip(readers, mine, strict=True)
                for window in (reader.read() for _ in range(file.windows[saved_group]))
            )
            rounds = torch.tensor([sum(file.windows[saved_group] for file in mine)], device=device)
            world.all_reduce(rounds, dist.ReduceOp.MAX)
            for _ in range(int(rounds)):
                window = next(windows, None)
                keys = torch.empty(0, dtype=torch.int64, device=device)
                packed = torch.empty((0, store.row_bytes), dtype=torch.uint8, device=device)
                if window is not None:
                    keys = tables.keys(saved_group, torch.from_numpy(window.keys).to(device))
                    packed = torch.from_numpy(window.packed).to(device)
                addresses = keys if store.homes is None else store.homes.addresses(keys)
                _send_home(world, store, addresses, packed)


def _send_home(world: Peers, store: GroupStore, addresses: torch.Tensor, packed: torch.Tensor) -> None:
    """Collective. Write the uint8 [n, row_bytes] rows of int64 [n] addresses at their homes."""
    width = _KEY_BYTES + store.row_bytes
    order, counts = devices.ordered(addresses % world.size, world.size)
    received_counts = world.all_to_all(counts, [1] * world.size, [1] * world.size).tolist()
    joined = torch.cat([addresses.view(-1, 1).view(torch.uint8), packed], dim=1).index_select(0, order)
    received = world.all_to_all(
        joined.view(-1), [count * width for count in counts.tolist()], [count * width for count in received_counts]
    ).view(-1, width)
    slots = store.home_slots(received[:, :_KEY_BYTES].clone().view(torch.int64).view(-1))
    rows = received[:, _KEY_BYTES:]
    if store.tier is not None:
        store.tier.write_through(slots, rows)
    else:
        store.unpack(rows, slots)


def _window_rows(store: GroupStore) -> int:
    """Return the rows of a window."""
    return max(1, blocks.MAX_WINDOW_BYTES // (_KEY_BYTES + store.row_bytes))


def _text(table: TableSpec) -> str:
    return f"{table.rows} x {table.dim} {table.dtype} with {table.optimizer}"


def table_fields(keyspace: KeySpace) -> tuple[dict[str, Any], ...]:
    """Return ``Manifest.tables`` of this job."""
    return tuple(
        {"name": t.name, "rows": t.rows, "dim": t.dim, "dtype": t.dtype, "optimizer": t.optimizer}
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
