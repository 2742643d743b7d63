"""The tables of a save of a series, and how their rows come to their homes in a job that may have other tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist

from flexd.core.arrays import Int64Array
from flexd.core.errors import CheckpointError
from flexd.core.keyspace import NO_KEY, KeySpace, TableSpec
from flexd.core.sharding_types import ROW_WISE
from flexd.embedding.checkpoint import table_rows
from flexd.embedding.checkpoint.saved_rows import KEY_BYTES, Manifest, read_windows
from flexd.embedding.exchange.addressed_rows import AddressedRows
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.store.store import GroupStore

ChangedTablesOption = Literal["init", "error"]
# Fields of ``Manifest.tables`` that are not of a ``TableSpec``.
_BESIDE_SPECS = ("read_only", "admit_after")
_OTHER_TABLES = "construct the collection with the tables and optimizer of the checkpoint"
_USE_INIT = (
    ', or load with changed_tables="init": tables and rows that the checkpoint lacks begin from their seed, and tables '
    "that the collection lacks are left out"
)


class SavedTables:
    """The tables of a save and where they are in this job, which may have them in another order.

    Args:
        tables: ``Manifest.tables``.
        admit_after: of this job's tables of unbounded ids.

    Attributes:
        admit_after: of the save's tables of unbounded ids, in their order.
        moved: by name of tables of unbounded ids that have another number of rows, int64 [rows of the save]: the row of
            this job that has the id of each, -1 if it has none.
    """

    def __init__(
        self,
        tables: Sequence[dict[str, Any]],
        keyspace: KeySpace,
        admit_after: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        read_only = [table["name"] for table in tables if table.get("read_only")]
        specs = [TableSpec(**{name: table[name] for name in table if name not in _BESIDE_SPECS}) for table in tables]
        self.saved, self.keyspace, self._admit_after = KeySpace(specs, read_only), keyspace, admit_after
        self.admit_after = {table["name"]: table["admit_after"] for table in tables if "admit_after" in table}
        self.moved: Mapping[str, Int64Array] = {}

    def check(self, changed_tables: ChangedTablesOption) -> list[str]:
        """Return the differences between the tables of the save and those of this job.

        Raises:
            CheckpointError: there are some, and ``changed_tables`` is "error", or rows of the save do not fit.
        """
        here = {table.name: replace(table, sharding=ROW_WISE) for table in self.keyspace.tables}  # as every save
        there = {table.name: table for table in self.saved.tables}
        changes = [f"table {name!r} is missing in the checkpoint" for name in here if name not in there]
        changes += [f"table {name!r} is unknown to the collection" for name in there if name not in here]
        refused = [] if here.keys() & there.keys() else ["no table of the checkpoint is in the collection"]
        for name, table in here.items():
            of_save, after, mine = there.get(name), self.admit_after.get(name), self._admit_after.get(name)
            if of_save is None or (of_save, after) == (table, mine):
                continue
            # Which rows unbounded ids have is decided anew.
            is_unbounded = after is not None and mine is not None
            fits = is_unbounded or (after == mine and table.rows > of_save.rows)
            (changes if fits and replace(of_save, rows=table.rows) == table else refused).append(
                f"table {name!r} is {_text(of_save, after)} in the checkpoint and {_text(table, mine)} in the "
                "collection"
            )
        if changed_tables not in get_args(ChangedTablesOption):
            refused.append(f"changed_tables={changed_tables!r}, which is not 'init' or 'error'")
        if refused or (changes and changed_tables == "error"):
            raise CheckpointError("; ".join(refused + changes), remedy=_OTHER_TABLES + ("" if refused else _USE_INIT))
        return changes

    @property
    def left_out(self) -> list[str]:
        """Tables that were trained in the save and are read only in this job: their optimizer state is left out."""
        return sorted((self.keyspace.read_only - self.saved.read_only) & self.saved.index.keys())

    @property
    def begun(self) -> list[str]:
        """Tables that were read only in the save and are trained in this job: their optimizer state begins anew."""
        return sorted((self.saved.read_only - self.keyspace.read_only) & self.keyspace.index.keys())

    def groups(self, saved_group: int) -> list[int]:
        """Return the dim-groups of this job that have the tables of one of the save: several if other tables are read
        only here, none if it has none of the tables."""
        names = [self.saved.tables[table].name for table in self.saved.groups[saved_group].tables]
        here = [self.keyspace.index[name] for name in names if name in self.keyspace.index]
        return sorted({int(self.keyspace.group_of_table[table]) for table in here})

    def keys(self, keys: Int64Array) -> Int64Array:
        """int64 [n] keys of the save -> int64 [n] keys of this job, ``NO_KEY`` for rows of tables that it lacks."""
        tables, rows = self.saved.table_rows(keys)
        index = self.keyspace.index
        for name, to in self.moved.items():
            ours = tables == self.saved.index[name]
            rows[ours] = to[rows[ours]]
        kept = np.array([table.name in index for table in self.saved.tables])
        here = np.array([self.keyspace.first_key[index.get(table.name, 0)] for table in self.saved.tables])
        return np.where(kept[tables] & (rows >= 0), here[tables] + rows, NO_KEY)


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
        for reader, file in zip(readers, mine, strict=True):
            for _ in islice(reader, sum(file.windows[len(tables.saved.groups) :])):  # of ids
                pass
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
                    send_home(world, store, addresses, rows)


def send_home(world: Peers, store: GroupStore, addresses: torch.Tensor, packed: torch.Tensor) -> None:
    """Collective. Write the uint8 [n, row_bytes] rows of int64 [n] addresses at their homes.

    The windows of all ranks may have one home, that of a whole table: rows travel in so many parts that no rank
    receives much more than a window at once.
    """
    width = KEY_BYTES + store.row_bytes
    homes = addresses % world.size
    arriving = torch.bincount(homes, minlength=world.size)
    world.all_reduce(arriving)
    parts = max(1, -(-int(arriving.max()) * width // table_rows.MAX_WINDOW_BYTES))
    joined = torch.cat([addresses.view(-1, 1).view(torch.uint8), packed], dim=1)
    places = torch.arange(len(addresses), device=addresses.device)
    for part in range(parts):
        of_part = places[part::parts]
        received = AddressedRows.exchanged(world, homes[of_part], joined[of_part]).arrived
        slots = store.home_slots(received[:, :KEY_BYTES].clone().view(torch.int64).view(-1))
        store.write_homes(received[:, KEY_BYTES:], slots)


def _text(table: TableSpec, admit_after: int | None) -> str:
    of_ids = "" if admit_after is None else f", unbounded ids with admit_after {admit_after}"
    return f"{table.rows} x {table.dim} {table.dtype} with {table.optimizer}{of_ids}"


def table_fields(keyspace: KeySpace, admit_after: Mapping[str, int]) -> tuple[dict[str, Any], ...]:
    """Return ``Manifest.tables`` of this job. Args: as of ``SavedTables``."""
    return tuple(
        {"name": t.name, "rows": t.rows, "dim": t.dim, "dtype": t.dtype, "optimizer": t.optimizer}
        | ({"read_only": True} if t.name in keyspace.read_only else {})
        | ({"admit_after": admit_after[t.name]} if t.name in admit_after else {})
        for t in keyspace.tables
    )
