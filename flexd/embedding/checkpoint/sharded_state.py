"""Checkpoints of a collection that any number of ranks can load: whole tables in ``torch.distributed.checkpoint``.

A checkpoint has one tensor for each table and each part of its optimizer state: rows in the order of their ids, under
the names of a plain module (``embeddings.<table>.weight``). A table that fits a window is a plain tensor that one rank
saves (``owner``); a larger one is a DTensor, ``Shard(0)`` over all ranks, a contiguous block per rank. The files do not
show which it was, so a checkpoint is independent of ranks, nodes, tiers and replicas. Saving and loading each need the
memory of one more copy of this rank's share of the tables and their state, on a device of the caller's choice.

Replicas are not saved: after loading they are copied again from their homes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from flexd.core.errors import CheckpointError
from flexd.embedding.checkpoint.changed_tables import TableStates
from flexd.embedding.checkpoint.table_rows import collect, distribute, fingerprint
from flexd.embedding.checkpoint.whole_tables import WholeTable, whole_tables
from flexd.embedding.meetings import agree_on_reading

if TYPE_CHECKING:
    from flexd.embedding.checkpoint.id_tables import IdTables
    from flexd.embedding.collection import EmbeddingCollection
    from flexd.embedding.table_access import TableAccess

CPU = torch.device("cpu")
OTHER_TABLES = (
    "construct the collection with the tables and optimizer of the checkpoint, or, for new and enlarged tables, load "
    "with dcp.load(..., planner=flexd.ChangedTables())"
)


class ShardedState:
    """Adapter that saves a collection with ``torch.distributed.checkpoint`` beside model and optimizer::

        dcp.save({"model": model, "tables": ShardedState(collection)}, checkpoint_id=path)
        dcp.load({"model": model, "tables": ShardedState(collection)}, checkpoint_id=path)

    (``collection.state_dict()`` itself contains only the home rows of one rank.)
    """

    def __init__(self, collection: EmbeddingCollection, device: torch.device = CPU) -> None:
        self._collection = collection
        self._engine = collection.engine
        self._world = collection.engine.groups.world
        self._device = device
        self._step_key = f"optimizer.{collection.keyspace.tables[0].optimizer}.step"

    def state_dict(self) -> dict[str, Any]:
        """Collective. Return a copy of all tables, optimizer state and step, with a fingerprint of each table.

        They are DTensors on the device (plain tensors without ``torch.distributed``), or plain tensors in the state of
        one rank alone for tables that fit a window.
        """
        agree_on_reading(self._engine)
        state: dict[str, torch.Tensor] = {}
        ids = id_tables(self._collection)
        tables = [*whole_tables(self._collection), *(() if ids is None else ids.tables)]
        sums = torch.zeros(len(tables), dtype=torch.int64, device=self._collection.device)
        with self._collection.traffic.uncounted(), torch.no_grad():
            for table in tables:
                found = collect(
                    self._world, table.homes, list(table.columns.values()), table.rows_by_rank, self._device
                )
                if table.has_part:
                    sums[table.number] = fingerprint(table.rows_by_rank[table.homes.rank].start, found)
                    for key, part in zip(table.columns, found, strict=True):
                        state[key] = as_dtensor(part, (table.spec.rows, part.shape[1])) if table.owner is None else part
            self._world.all_reduce(sums)
        for table, total in zip(tables, sums.tolist(), strict=True):
            if table.has_fingerprint:
                state[table.fingerprint_key] = torch.tensor(total, dtype=torch.int64)
        state[self._step_key] = torch.tensor(self._engine.steps, dtype=torch.int64)
        of_ids = {} if ids is None else ids.progress()
        state |= of_ids
        paths = {
            table.spec.name: (table.rows, tuple((key,) for key in (*table.columns, table.fingerprint_key)))
            for table in tables
        }
        paths |= {f"the use of {key}": (0, ((key,),)) for key in of_ids}
        return TableStates(state, paths)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Collective. Replace all tables, optimizer state and step by those that were saved of equal tables, or of
        others if it was loaded with ``flexd.ChangedTables``.

        Raises:
            CheckpointError: on every rank, if on any rank tables are missing or of another shape, dtype or optimizer,
                or if a table differs from the saved one (a torn checkpoint). The collection is unchanged.
        """
        ids = id_tables(self._collection)
        tables = [*whole_tables(self._collection), *(() if ids is None else ids.tables)]
        changed, faults = False, []
        if isinstance(state_dict, TableStates) and (saved_rows := state_dict.saved_rows) is not None:
            changed = any(saved_rows[table.spec.name] < table.rows for table in tables)
            faults = [
                f"table {table.spec.name!r} of unbounded ids has {rows} rows in the checkpoint and {table.rows} here, "
                "which flexd.CheckpointSeries can load"
                for table in tables
                if table.of_ids and (rows := saved_rows[table.spec.name]) not in (0, table.rows)
            ]
            tables = [replace(table, rows=rows) for table in tables if (rows := saved_rows[table.spec.name])]
        given = {key: block_of(value) for key, value in state_dict.items() if torch.is_tensor(value)}
        found = {key: (tuple(value.shape), value.dtype) for key, value in state_dict.items() if torch.is_tensor(value)}
        shapes = {**self._shapes(tables), **({} if ids is None else ids.progress_shapes(tables))}
        raise_if_any_rank_refuses(self._collection, faults + _differences(shapes, found))
        with self._collection.traffic.uncounted(), torch.no_grad():
            self._raise_if_torn(tables, given)
            self._engine.before_rows_load()
            if changed:
                begin_untrained(self._collection)
            for table in tables:
                values = [given[key] for key in table.columns] if table.has_part else []
                distribute(self._world, table.homes, list(table.columns.values()), table.rows_by_rank, values)
        self._engine.steps = int(given[self._step_key])
        if ids is not None:
            ids.load(given)

    def _raise_if_torn(self, tables: Sequence[WholeTable], given: Mapping[str, torch.Tensor]) -> None:
        """Collective. Compare the fingerprints of a state with those that were saved with it."""
        sums = torch.zeros(len(tables), dtype=torch.int64, device=self._collection.device)
        for at, table in enumerate(tables):
            if table.has_part:
                start = table.rows_by_rank[table.homes.rank].start
                sums[at] = fingerprint(start, [given[key] for key in table.columns])
        self._world.all_reduce(sums)
        differs = [
            table.has_fingerprint and int(given[table.fingerprint_key]) != total
            for table, total in zip(tables, sums.tolist(), strict=True)
        ]
        torn = torch.tensor(differs, device=sums.device).to(torch.int64)
        self._world.all_reduce(torn, dist.ReduceOp.MAX)
        names = [table.spec.name for table, differs in zip(tables, torn.tolist(), strict=True) if differs]
        if names:
            raise CheckpointError(
                f"tables {', '.join(names)} differ from the saved ones: parts are missing or of another checkpoint",
                remedy="load another checkpoint",
            )

    def _shapes(self, tables: Sequence[WholeTable]) -> Shapes:
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            key: ((table.rows, held.shape[1]), held.dtype)
            for table in tables
            if table.has_part
            for key, held in table.columns.items()
        }
        keys = [self._step_key, *(table.fingerprint_key for table in tables if table.has_fingerprint)]
        return shapes | dict.fromkeys(keys, ((), torch.int64))


def id_tables(collection: EmbeddingCollection) -> IdTables | None:
    """Return the tables of sets of unbounded ids; None without any."""
    if collection.engine.ids is None:
        return None
    from flexd.embedding.checkpoint.id_tables import IdTables  # loaded where a job has unbounded ids

    return IdTables(collection, collection.engine.ids)


def as_dtensor(block: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the whole table of ``shape`` of which this rank has a block of rows; the block without ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return block
    mesh = DeviceMesh.from_group(dist.group.WORLD, block.device.type)  # type: ignore[arg-type]
    return DTensor.from_local(block, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=(*shape[1:], 1))


def block_of(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's block of a whole table."""
    return value.to_local() if isinstance(value, DTensor) else value


Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def _differences(expected: Shapes, found: Shapes) -> list[str]:
    differences = []
    for key, (shape, dtype) in expected.items():
        if key not in found:
            differences.append(f"{key} is missing")
        elif found[key] != (shape, dtype):
            differences.append(
                f"{key} is {_text(*found[key])} in the checkpoint and {_text(shape, dtype)} in the collection"
            )
    prefixes = ("embeddings.", "optimizer.", "ids.")
    differences += [
        f"{key} is unknown to the collection" for key in found if key.startswith(prefixes) and key not in expected
    ]
    return differences


def _text(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{' x '.join(map(str, shape)) or 'a number'} {str(dtype).removeprefix('torch.')}"


def begin_untrained(collection: EmbeddingCollection) -> None:
    """Local. Set all rows to their initial values if they were trained: those that a checkpoint lacks keep them."""
    if collection.steps:
        collection.reset_parameters()


def raise_if_any_rank_refuses(
    collection: TableAccess,
    faults: list[str],
    *,
    remedy: str = OTHER_TABLES,
) -> None:
    """Collective. Raise CheckpointError on every rank if any rank has faults."""
    worst = torch.tensor([collection.rank + 1 if faults else 0], device=collection.device)
    with collection.traffic.uncounted():
        collection.engine.groups.world.all_reduce(worst, dist.ReduceOp.MAX)
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(f"rank {collection.rank}: {'; '.join(faults[:5])}{more}", remedy=remedy)
    if int(worst.item()):
        raise CheckpointError(
            f"rank {int(worst.item()) - 1} refused the checkpoint",
            remedy=f"see the error of rank {int(worst.item()) - 1}",
        )
