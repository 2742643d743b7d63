"""Tables as wholes: read, loaded and saved, beside the look-ups of a collection."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
import torch.distributed as dist
from torch import nn

from flexd.core.errors import CheckpointError, EmbeddingError
from flexd.core.keyspace import KeySpace, row_width
from flexd.core.placement import RankLayout, Tier
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.engine import RowEngine
from flexd.embedding.exchange.collectives import Traffic
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.meetings import agree_on_reading
from flexd.embedding.rank_rows import InitialRows
from flexd.embedding.row_hashes import fill_initial_rows
from flexd.embedding.store.quantized_rows import as_stored, looked_up, looked_up_dtype
from flexd.embedding.store.store import TORCH_DTYPES, GroupStore

if TYPE_CHECKING:
    from flexd.embedding.checkpoint.table_file import StoredMatrix
    from flexd.embedding.checkpoint.table_rows import TableHomes
    from flexd.embedding.collection import EmbeddingCollection
    from flexd.embedding.features import FeatureMap
    from flexd.embedding.optimizer_handle import FusedOptimizer
    from flexd.embedding.store.memory import RankMemory


class TableAccess(nn.Module):
    """A collection's access to whole tables. Its attributes are those of ``EmbeddingCollection``."""

    device: torch.device

    keyspace: KeySpace
    layout: RankLayout
    rank: int
    engine: RowEngine
    traffic: Traffic
    tables: tuple[EmbeddingTable, ...]
    optimizer: FusedOptimizer
    _groups: ChainGroups
    _seed: int
    _initial: set[int]
    """Read-only tables of which no rows were loaded, but by a checkpoint."""
    _features: FeatureMap
    _feature_map: Callable[[], FeatureMap]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Refuse to move the tables to another device. ``model.half()`` does not change them: they have their own
        dtype."""
        target = fn(torch.empty(0, dtype=torch.int64, device=self.device)).device
        if target != self.device:
            raise EmbeddingError(
                f"the tables are on {self.device} and cannot be moved to {target}",
                remedy="construct the collection with device=",
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a table's values."""
        return looked_up_dtype(TORCH_DTYPES[self.keyspace.tables[self.keyspace.index[name]].dtype])

    @torch.no_grad()
    def load_rows(self, name: str, first_row: int, values: torch.Tensor | None, *, source: int | None = None) -> None:
        """Collective. Set rows of a table, starting at ``first_row``, to ``values`` [n, dim], for instance pretrained
        vectors.

        Every rank gives the same values, which is checked by a hash of their bits in the table's dtype; or rank
        ``source`` gives them and sends each row to its home. Replicas are copied again before the next pass. The
        optimizer's state does not change.

        Args:
            values: may be None on other ranks than ``source``.

        Raises:
            EmbeddingError: on every rank: the values do not fit the table on one, or ranks gave different values,
                rows or tables. Nothing is loaded. On this rank: the table or the source is unknown.
        """
        from flexd.embedding.checkpoint.table_rows import agree_on_rows, distribute

        table = self._table(name)
        if source is not None and not 0 <= source < self.layout.world_size:
            raise EmbeddingError(f"source={source}", remedy=f"a rank below {self.layout.world_size}, or None")
        store, homes = self._homes(table)
        agree_on_reading(self.engine)
        with self.traffic.uncounted():
            rows = agree_on_rows(
                self._groups.world, table, self.keyspace.tables[table], first_row, values, source, store.rows
            )
            if source is None and values is not None:
                self.set_rows(name, first_row, values)
                return
            self._before_load(store, homes, rows)
            given = [] if values is None else [as_stored(values, store.rows.dtype)]
            distribute(self._groups.world, homes, [store.rows], homes.only(source or 0, rows), given)

    @torch.no_grad()
    def load_file(self, name: str, path: str | os.PathLike[str], *, tensor: str = "") -> None:
        """Collective. Set all rows of a table to those of a matrix in a file that every rank can read, npy or
        safetensors, or in the directory of a checkpoint of ``torch.distributed.checkpoint``, of TorchRec's
        ``DistributedModelParallel`` say; for instance one that is larger than a rank's memory.

        Rows of int8 come from int8 [rows, dim + 4], as ``flexd.int8_rows`` returns them, or from floats of any width.
        Each rank reads it for the rows that have their home there, once, or twice (for a check before) if rows of the
        table may have changed. Replicas are copied again before the next pass. The optimizer's state does not change.

        Args:
            tensor: name of the matrix in a safetensors file that has several, or in a checkpoint where several modules
                have the name of the table.

        Raises:
            EmbeddingError: there is no such table.
            CheckpointError: on every rank, if the file cannot be read on any, has other rows, dim or dtype than the
                table, or a number that is not finite. Nothing is loaded.
        """
        from flexd.embedding.checkpoint.sharded_state import raise_if_any_rank_refuses
        from flexd.embedding.checkpoint.table_rows import MAX_WINDOW_BYTES

        store, homes = self._homes(self._table(name))
        spec = self.keyspace.tables[homes.table]
        mine = homes.run(range(spec.rows))
        remedy = "give the rows, dim and dtype of the table, and finite numbers"
        # Rows that nobody has changed are checked as they are loaded, and made again if they cannot be: half the time.
        initial = store.tier is None and homes.table in self._initial and not self.engine.steps + self.engine.loads
        faults: list[str] = []
        agree_on_reading(self.engine)
        try:
            file = _stored(name, Path(path), tensor)
            faults = file.differences(spec) or ([] if initial else file.not_finite(mine.rows, MAX_WINDOW_BYTES))
        except CheckpointError as error:
            faults, remedy = [error.message], error.remedy
        raise_if_any_rank_refuses(self, [f"table {name!r}: {fault}" for fault in faults], remedy=remedy)
        self._before_load(store, homes, range(0))
        number, slot = self.engine.stores.index(store), mine.first_slot
        try:
            for rows, part in file.windows(mine.rows, MAX_WINDOW_BYTES):
                if initial and (faults := file.fault_of(rows, part)):
                    break
                store.rows[slot : slot + len(rows)] = as_stored(part, store.dtype)
                for each in self.engine.joined:
                    changed = torch.arange(slot, slot + len(rows), device=store.rows.device)
                    each.changed([(number, changed)], all_rows=False)
                slot += len(rows)
        except CheckpointError as error:
            faults, remedy = [error.message], error.remedy
        try:
            raise_if_any_rank_refuses(self, [f"table {name!r}: {fault}" for fault in faults], remedy=remedy)
        except CheckpointError:
            if initial:
                scale = self.tables[homes.table].scale
                fill_initial_rows(store.rows[mine.slots], spec.name, mine.rows, scale=scale, seed=self._seed)
            raise

    def freeze(self, *names: str) -> None:
        """Collective. Make tables read only from now on, as if they had been made with ``trainable=False``: between two
        steps, with the same names on every rank.

        Their optimizer state is given up. Rows that share a dim-group with others are copied once. In a loop of
        ``flexd.prefetch`` the batch that was looked up ahead is looked up again.

        Raises:
            EmbeddingError: on every rank: ranks name other tables or make other calls, a table is unknown, gradients
                wait for a step, or a rank has no memory. Nothing has changed.
        """
        self._regroup(names, freeze=True)

    def unfreeze(self, *names: str) -> None:
        """Collective. Train tables that are read only from now on; their optimizer state begins anew. As ``freeze``
        otherwise."""
        self._regroup(names, freeze=False)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Collective. Freeze or unfreeze all tables."""
        (self.unfreeze if requires_grad else self.freeze)(*self.keyspace.index)
        return self

    @torch.no_grad()
    def _regroup(self, names: tuple[str, ...], *, freeze: bool) -> None:
        from flexd.embedding.freezing import regrouped_rows

        with torch.inference_mode(mode=False), torch.device("cpu"):
            rows = regrouped_rows(self.engine, names, self._initial_rows(), freeze=freeze)
            if rows is None:
                return
            self.keyspace = rows.keyspace
            self.tables = tuple(
                replace(table, trainable=table.name not in rows.keyspace.read_only) for table in self.tables
            )
            self.engine.use(rows)
            self._features = self._feature_map()

    def _initial_rows(self) -> InitialRows:
        return InitialRows([table.scale for table in self.tables], self._seed, self.optimizer.initial_states)

    def _fill_initial_values(self) -> None:
        """Local. Set all rows and their optimizer state to their initial values."""
        self.engine.rows.initialise(self._initial_rows())

    def initial_table(self, name: str) -> torch.Tensor:
        """Return [rows, dim], the initial values of a whole table, equal for any number of ranks."""
        spec = self.tables[self.keyspace.index[name]]
        table = torch.empty((spec.rows, row_width(spec.dtype, spec.dim)), dtype=TORCH_DTYPES[spec.dtype])
        fill_initial_rows(table, spec.name, range(spec.rows), scale=spec.scale, seed=self._seed)
        return looked_up(table, table.dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set rows and optimizer state to their initial values, and the number of steps to 0; on every rank.

        It communicates only to finish a running ``flexd.prefetch`` exchange.
        """
        self.engine.before_rows_load()
        if self.engine.ids is not None:
            self.engine.ids.reset()
        with torch.device("cpu"):
            self._fill_initial_values()
        self.engine.steps = 0

    def memory(self) -> RankMemory:
        """Return the current bytes and upper bounds of this rank, by part. Not collective."""
        from flexd.embedding.store.memory import rank_memory

        engine = self.engine
        return rank_memory(
            engine.stores, self.layout, engine.max_migration_bytes, engine.migrator.max_chunk_rows,
            (engine.passes, [each.held for each in engine.joined]), engine.inbox.waiting_bytes,
            (engine.router, engine.sync, [each.working for each in engine.joined]), engine.inbox.prepared_bytes,
        )  # fmt: skip

    def _table(self, name: str) -> int:
        if name not in self.keyspace.index:
            raise EmbeddingError(f"no table {name!r}", remedy=f"one of {', '.join(self.keyspace.index)}")
        return self.keyspace.index[name]

    @torch.no_grad()
    def set_rows(self, name: str, first_row: int, values: torch.Tensor) -> None:
        """As ``load_rows`` with values that are known to be equal and to fit: it communicates only to finish a running
        ``flexd.prefetch`` exchange."""
        store, homes = self._homes(self.keyspace.index[name])
        self._before_load(store, homes, range(first_row, first_row + values.shape[0]))
        homes.write(store.rows, first_row, as_stored(values, store.rows.dtype))

    def _before_load(self, store: GroupStore, homes: TableHomes, rows: range) -> None:
        self._initial.discard(homes.table)
        slots = homes.run(rows).slots
        changed = torch.arange(slots.start, slots.stop, device=store.rows.device)
        self.engine.before_rows_load((self.engine.stores.index(store), changed))

    def gather_table(self, name: str, device: torch.device | str | None = None) -> torch.Tensor:
        """Collective. Return [rows, dim] of a whole table on every rank, for small tables, tests and exports.

        Args:
            device: of the result; default that of the tables. With "cpu" an accelerator holds one window at a time.
        """
        from flexd.embedding.checkpoint.table_rows import collect

        store, homes = self._homes(self.keyspace.index[name])
        agree_on_reading(self.engine)
        everything = [range(homes.rows)] * homes.world_size
        there = self.device if device is None else torch.device(device)
        with self.traffic.uncounted():
            found = collect(self._groups.world, homes, [store.rows], everything, there)[0]
        return looked_up(found, store.dtype)

    def rows_of(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Collective. Return int64 [n], the rows of int64 [n] ids of a table of unbounded ids; -1 of an id without a
        row of its own, which reads the last row of the table. Every rank may give other ids.

        Raises:
            EmbeddingError: there is no such table, or its ids are its rows.
        """
        from flexd.embedding.ids.queries import rows_of  # loaded where a job has unbounded ids

        return rows_of(self.engine, self._table(name), ids)

    def load_ids(self, name: str, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Collective. Give int64 [n] ids rows in a table of unbounded ids, with ``values`` [n, dim], for instance
        those of another system; their optimizer state begins. Every rank gives a part of them.

        Returns:
            As ``rows_of``: -1 of ids for which there is no room among those that were loaded since the last step.

        Raises:
            EmbeddingError: there is no such table, or its ids are its rows; on every rank: ids and values of one do not
                fit. Nothing is loaded.
        """
        from flexd.embedding.ids.queries import load_ids

        table = self._table(name)
        state = self.optimizer.initial_states[self.keyspace.tables[table].optimizer]
        return load_ids(self.engine, table, ids, values, state)

    def ids_of(self, name: str, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Collective. Return int64 [n], the ids that have int64 [n] rows of a table of unbounded ids, and bool [n],
        False where a row is no id's: its id is 0 then. Every rank may give other rows.

        Raises:
            EmbeddingError: there is no such table, or its ids are its rows.
        """
        from flexd.embedding.ids.queries import ids_of

        return ids_of(self.engine, self._table(name), rows)

    def _homes(self, table: int) -> tuple[GroupStore, TableHomes]:
        from flexd.embedding.checkpoint.table_rows import TableHomes

        store = next(store for store in self.engine.stores if table in store.group.tables)
        return store, TableHomes(self.engine.homes, table, self.rank)

    def replicas_bit_equal(self) -> bool:
        """Collective. Return whether all replicas, with optimizer state, equal their home copies bit for bit."""
        for each in self.engine.joined:
            each.wait()
        self.engine.migrator.complete()
        verdict = torch.ones(1, dtype=torch.int64, device=self.device)
        with self.traffic.uncounted():
            for number, store in enumerate(self.engine.stores):
                for tier, holders in ((Tier.NODE, self._groups.rail), (Tier.DEVICE, self._groups.world)):
                    packed = store.pack(store.directory.slots_at(store.directory.at_tier(number, tier)))
                    verdict *= all(torch.equal(packed, other) for other in holders.all_gather(packed))
            self._groups.world.all_reduce(verdict, dist.ReduceOp.MIN)
        return bool(verdict)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        from flexd.embedding.checkpoint.local_state import save_local

        save_local(cast("EmbeddingCollection", self), destination, prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        from flexd.embedding.checkpoint.local_state import load_local

        load_local(cast("EmbeddingCollection", self), state_dict, prefix, *args[2:5])


def _stored(table: str, path: Path, tensor: str) -> StoredMatrix:
    if path.is_dir():
        from flexd.embedding.checkpoint.dcp_table import DcpTable

        return DcpTable.of(path, tensor, table)
    from flexd.embedding.checkpoint.table_file import TableFile

    return TableFile.of(path, tensor)
