"""``state_dict`` of a collection with ``full_state_dict=True``: whole tables in rank 0's, for any number of ranks.

It is for frameworks that call ``state_dict()`` on every rank, write rank 0's, and load the file on every rank. Rank 0
gathers the tables window by window into host memory; at a load each rank has the whole state and keeps its home rows.
Keys are those of a plain module (``embeddings.<table>.weight``) and of ``ShardedState``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import KeySpace, state_columns
from flexd.embedding.checkpoint import table_rows
from flexd.embedding.checkpoint.sharded_state import CPU, id_tables
from flexd.embedding.checkpoint.table_rows import collect
from flexd.embedding.checkpoint.whole_tables import WholeTable, whole_tables

if TYPE_CHECKING:
    from flexd.embedding.collection import EmbeddingCollection

logger = logging.getLogger(__name__)

MAX_FULL_STATE_BYTES = 16 * 2**30
"""Of all tables with their optimizer state: rank 0 holds them at a save, and each rank at a load."""


def check_full_size(keyspace: KeySpace) -> None:
    """Raise EmbeddingError if whole tables with their state are larger than ``MAX_FULL_STATE_BYTES``."""
    nbytes = sum(
        table.rows * (table.row_bytes + (0 if table.name in keyspace.read_only else table.state_bytes))
        for table in keyspace.tables
    )
    if nbytes > MAX_FULL_STATE_BYTES:
        raise EmbeddingError(
            f"full_state_dict=True with tables of {nbytes:,} bytes, more than {MAX_FULL_STATE_BYTES:,}, which rank 0 "
            "would hold in host memory",
            remedy="leave full_state_dict out and save with flexd.CheckpointSeries on every rank",
        )


def is_full(state: dict[str, Any], prefix: str) -> bool:
    """Return whether a state dict has whole tables of the collection at ``prefix``."""
    return any(key.startswith(f"{prefix}embeddings.") for key in state)


def save_full(collection: EmbeddingCollection, destination: dict[str, Any], prefix: str) -> None:
    """Collective. Store all rows with their state and the step on rank 0, and nothing on the others."""
    ids = id_tables(collection)
    with collection.traffic.uncounted(), torch.no_grad():
        for table in (*whole_tables(collection), *(() if ids is None else ids.tables)):
            columns = list(table.columns.values())
            found = collect(collection.engine.groups.world, table.homes, columns, table.homes.only(0), CPU)
            if collection.rank == 0:
                destination.update({f"{prefix}{key}": value for key, value in zip(table.columns, found, strict=True)})
    if collection.rank == 0:
        destination[f"{prefix}step"] = torch.tensor(collection.engine.steps, dtype=torch.int64)
        if ids is not None:
            destination.update({f"{prefix}{key}": value for key, value in ids.progress().items()})


@torch.no_grad()
def load_full(
    collection: EmbeddingCollection,
    state: dict[str, Any],
    prefix: str,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Local. Load the home rows of this rank, and add differences to the lists; with any of the tables nothing is
    loaded."""
    ids = id_tables(collection)
    tables = [*whole_tables(collection), *(() if ids is None else ids.tables)]
    progress = {} if ids is None else ids.progress()
    known = {f"{prefix}{key}" for table in tables for key in table.columns} | {f"{prefix}step"}
    known |= {f"{prefix}{key}" for key in progress}
    dropped, begun = _other_state(tables, state, prefix)
    of_others = {key for keys in (*dropped.values(), *begun.values()) for key in keys}
    unexpected.extend(key for key in state if key.startswith(prefix) and key not in known | of_others)
    missing.extend(sorted(known - state.keys() - of_others))
    for table in tables:
        for key, held in table.columns.items():
            value, shape = state.get(prefix + key), (table.spec.rows, held.shape[1])
            if value is not None and tuple(value.shape) != shape:
                errors.append(f"{prefix}{key}: shape {tuple(value.shape)}, the table has {shape}")
    if errors:
        return
    collection.engine.rows.begin_state(sorted(begun), collection.optimizer.initial_states)
    for names, text in (
        (dropped, "were trained and are read only now: their optimizer state is left out"),
        (begun, "were read only and are trained now: their optimizer state begins anew"),
    ):
        if names and collection.rank == 0:
            logger.warning("tables %s of a state_dict %s", ", ".join(sorted(names)), text)
    for table in tables:
        for key, held in table.columns.items():
            if (value := state.get(prefix + key)) is None:
                continue
            each = max(1, table_rows.MAX_WINDOW_BYTES // max(1, held.shape[1] * held.element_size()))
            for first in range(0, table.spec.rows, each):
                table.homes.write(held, first, value[first : first + each])
    if f"{prefix}step" in state:
        collection.engine.steps = int(state[f"{prefix}step"])
    if ids is not None:
        ids.load({key: state[prefix + key] for key in progress if prefix + key in state})


def _other_state(
    tables: Sequence[WholeTable], state: dict[str, Any], prefix: str
) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return the keys of optimizer state of tables that were trained and are read only, and the other way round."""
    dropped: dict[str, set[str]] = {}
    begun: dict[str, set[str]] = {}
    for table in tables:
        start = f"{prefix}optimizer.{table.spec.optimizer}.{table.spec.name}."
        widths = state_columns(table.spec.optimizer, table.spec.dim)
        keys = {f"{start}{name}" for name in widths}
        if f"{prefix}embeddings.{table.spec.name}.weight" not in state or not keys:
            continue
        has, here = keys & state.keys(), len(table.columns) > 1
        if has and not here:
            dropped[table.spec.name] = keys
        elif here and not has:
            begun[table.spec.name] = keys
    return dropped, begun
