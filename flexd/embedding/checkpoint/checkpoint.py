"""Checkpoints of a collection that any number of ranks can load: whole tables in ``torch.distributed.checkpoint``.

A checkpoint has one tensor for each table and each part of its optimizer state: rows in the order of their ids, under
the names of a plain module (``embeddings.<table>.weight``). A table that fits a window is a plain tensor that one rank
saves (``owners``); a larger one is a DTensor, ``Shard(0)`` over all ranks, a contiguous block a rank. The files do not
show which it was, so a checkpoint is independent of ranks, nodes, tiers and replicas. Saving and loading each need the
memory of one more copy of this rank's share of the tables and their state, on a device of the caller's choice.

Replicas are not saved: after loading they are copied again from their homes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from flexd.core.errors import CheckpointError
from flexd.embedding.checkpoint.blocks import from_block, to_block
from flexd.embedding.checkpoint.given_rows import fingerprint
from flexd.embedding.checkpoint.saved_tables import SavedTable, from_owner, saved_tables, to_owner
from flexd.embedding.checkpoint.whole_tables import gather_rows
from flexd.embedding.collection import EmbeddingCollection

CPU = torch.device("cpu")
_STEP = "optimizer.{optimizer}.step"


class ShardedState:
    """Adapter that saves a collection with ``torch.distributed.checkpoint`` beside model and optimizer::

        dcp.save({"model": model, "tables": ShardedState(collection)}, checkpoint_id=path)
        dcp.load({"model": model, "tables": ShardedState(collection)}, checkpoint_id=path)

    (``collection.state_dict()`` itself contains only the home rows of one rank.)
    """

    def __init__(self, collection: EmbeddingCollection, device: torch.device = CPU) -> None:
        self._collection = collection
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        return sharded_state_dict(self._collection, self._device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_sharded_state_dict(self._collection, state_dict)


def sharded_state_dict(collection: EmbeddingCollection, device: torch.device = CPU) -> dict[str, torch.Tensor]:
    """Collective. Return a copy of all tables, optimizer state and step, with a fingerprint of each table.

    They are DTensors on ``device`` (plain tensors without ``torch.distributed``), or plain tensors in the state of one
    rank alone for tables that fit a window.
    """
    collection.engine.settle()
    state: dict[str, torch.Tensor] = {}
    tables = saved_tables(collection)
    sums = torch.zeros(len(tables), dtype=torch.int64, device=collection.device)
    with collection.traffic.uncounted(), torch.no_grad():
        for table in tables:
            if table.owner is not None:
                whole = to_owner(_world(collection), table.homes, table.held, table.owner, device)
                if whole is not None:
                    state |= {column.key: part for column, part in zip(table.columns, whole, strict=True)}
                    state[table.fingerprint_key] = fingerprint(0, whole).to(CPU)
                continue
            blocks = [to_block(_world(collection), table.homes, held, device) for held in table.held]
            for column, block in zip(table.columns, blocks, strict=True):
                state[column.key] = as_dtensor(block, column.shape)
            sums[table.number] = fingerprint(table.first_row, blocks)
        if any(table.owner is None for table in tables):
            _world(collection).all_reduce(sums)
        of_all = sums.tolist()
        for table in tables:
            if table.owner is None and table.has_fingerprint:
                state[table.fingerprint_key] = torch.tensor(of_all[table.number], dtype=torch.int64)
        state[_step_key(collection)] = torch.tensor(collection.engine.steps, dtype=torch.int64)
    return state


def load_sharded_state_dict(collection: EmbeddingCollection, state: Mapping[str, Any]) -> None:
    """Collective. Replace all tables, optimizer state and step by those of a ``sharded_state_dict`` of equal tables.

    Raises:
        CheckpointError: on every rank, if on any rank tables are missing or of another shape, dtype or optimizer, or if
            a table differs from the saved one (a torn checkpoint). The collection is unchanged.
    """
    tables = saved_tables(collection)
    found = {key: (tuple(value.shape), value.dtype) for key, value in state.items() if torch.is_tensor(value)}
    raise_if_any_rank_refuses(collection, _differences(_shapes(collection, tables), found))
    with collection.traffic.uncounted(), torch.no_grad():
        _raise_if_torn(collection, tables, state)
        collection.engine.before_rows_load()
        for table in tables:
            if table.owner is not None:
                whole = [block_of(state[column.key]) for column in table.columns] if table.is_mine else None
                from_owner(_world(collection), table.homes, table.held, table.owner, whole)
                continue
            for column in table.columns:
                from_block(_world(collection), column.homes, block_of(state[column.key]), column.held)
    collection.engine.steps = int(block_of(state[_step_key(collection)]))


def _raise_if_torn(collection: EmbeddingCollection, tables: list[SavedTable], state: Mapping[str, Any]) -> None:
    """Collective. Compare the fingerprints of a state with those that were saved with it."""
    sums = torch.zeros(len(tables), dtype=torch.int64, device=collection.device)
    for table in tables:
        if table.owner is None or table.is_mine:
            sums[table.number] = fingerprint(table.first_row, [block_of(state[column.key]) for column in table.columns])
    _world(collection).all_reduce(sums)
    of_all = sums.tolist()
    differs = [
        table.has_fingerprint and int(block_of(state[table.fingerprint_key])) != of_all[table.number]
        for table in tables
    ]
    torn = torch.tensor(differs, device=collection.device).to(torch.int64)
    _world(collection).all_reduce(torn, dist.ReduceOp.MAX)
    names = [table.spec.name for table, differs in zip(tables, torn.tolist(), strict=True) if differs]
    if names:
        raise CheckpointError(
            f"tables {', '.join(names)} differ from the saved ones: parts are missing or of another checkpoint",
            remedy="load another checkpoint",
        )


def whole_state_dict(collection: EmbeddingCollection) -> dict[str, torch.Tensor]:
    """Collective. Return the content of ``sharded_state_dict`` as whole tables on every rank, for small tables.

    Any module with an ``nn.Embedding`` at ``embeddings.<table>`` (TorchRec's names) can load them.
    """
    collection.engine.settle()
    state: dict[str, torch.Tensor] = {}
    with collection.traffic.uncounted(), torch.no_grad():
        for table in saved_tables(collection):
            whole = [gather_rows(_world(collection), column.homes, column.held, CPU) for column in table.columns]
            state |= {column.key: rows for column, rows in zip(table.columns, whole, strict=True)}
            state[table.fingerprint_key] = fingerprint(0, whole)
    state[_step_key(collection)] = torch.tensor(collection.engine.steps, dtype=torch.int64)
    return state


def _world(collection: EmbeddingCollection) -> Any:
    return collection.engine.groups.world


def _step_key(collection: EmbeddingCollection) -> str:
    return _STEP.format(optimizer=collection.keyspace.tables[0].optimizer)


def _shapes(
    collection: EmbeddingCollection, tables: list[SavedTable]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of every tensor in the state of this rank."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        column.key: (column.shape, column.held.dtype)
        for table in tables
        if table.owner is None or table.is_mine
        for column in table.columns
    }
    shapes |= {table.fingerprint_key: ((), torch.int64) for table in tables if table.has_fingerprint}
    return shapes | {_step_key(collection): ((), torch.int64)}


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
    """List the differences between the expected tensors and those of a checkpoint."""
    differences = []
    for key, (shape, dtype) in expected.items():
        if key not in found:
            differences.append(f"{key} is missing")
        elif found[key] != (shape, dtype):
            differences.append(
                f"{key} is {_text(*found[key])} in the checkpoint and {_text(shape, dtype)} in the collection"
            )
    prefixes = ("embeddings.", "optimizer.")
    differences += [
        f"{key} is unknown to the collection" for key in found if key.startswith(prefixes) and key not in expected
    ]
    return differences


def _text(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{' x '.join(map(str, shape)) or 'a number'} {str(dtype).removeprefix('torch.')}"


def raise_if_any_rank_refuses(
    collection: EmbeddingCollection,
    faults: list[str],
    *,
    remedy: str = "construct the collection with the tables and optimizer of the checkpoint",
) -> None:
    """Collective. Raise CheckpointError on every rank if any rank has faults."""
    worst = torch.tensor([collection.rank + 1 if faults else 0], device=collection.device)
    with collection.traffic.uncounted():
        _world(collection).all_reduce(worst, dist.ReduceOp.MAX)
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(f"rank {collection.rank}: {'; '.join(faults[:5])}{more}", remedy=remedy)
    if int(worst.item()):
        raise CheckpointError(
            f"rank {int(worst.item()) - 1} refused the checkpoint",
            remedy=f"see the error of rank {int(worst.item()) - 1}",
        )
