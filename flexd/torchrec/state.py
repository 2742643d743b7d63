"""Checkpoints of ``DistributedModelParallel``: read into replaced tables, and written so that it can read them.

They have a tensor for each table under the name of its weight in the model, and one for each part of the state of the
fused optimizer, sharded in any way. ``torch.distributed.checkpoint`` reads from them the block of rows that a rank asks
for, so no rank has a whole table. A save and a load need the memory of one more copy of this rank's share.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flexd.core.errors import CheckpointError
from flexd.embedding.checkpoint.changed_tables import TablePaths, TableStates
from flexd.embedding.checkpoint.sharded_state import CPU, as_dtensor, block_of, raise_if_any_rank_refuses
from flexd.embedding.checkpoint.table_rows import TableHomes, collect, distribute
from flexd.embedding.checkpoint.whole_tables import whole_tables
from flexd.embedding.meetings import agree_on_reading
from flexd.embedding.store.slow.tiered_rows import RowColumn
from flexd.torchrec.replaced_tables import ReplacedTables

# Of each optimizer TorchRec's names of its state, in the order of flexd's, and whether it is one number per row.
_NAMES_OF_STATE: dict[str, tuple[tuple[str, bool], ...]] = {
    "sgd": (),
    "adagrad": (("momentum1", False),),
    "rowwise_adagrad": (("momentum1", True),),
    "adam": (("momentum1", False), ("exp_avg_sq", False)),
    "rowwise_adam": (("momentum1", False), ("exp_avg_sq", True)),
}
_NEEDS_STEPS = ("adam", "rowwise_adam")


class ModelState:
    """The ``state_dict`` of a model with replaced collections, as ``DistributedModelParallel`` has it::

        dcp.save({"model": ModelState(model, tables), "optimizer": FusedOptimizerState(tables)}, checkpoint_id=path)
        dcp.load({"model": ModelState(model, tables), "optimizer": FusedOptimizerState(tables)}, checkpoint_id=path)

    ``{"model": dmp, "optimizer": dmp.fused_optimizer}`` saves and loads the same there.

    Args:
        model: with or without ``DistributedDataParallel`` around it, which leaves no trace in the names.
        tables: what ``flexd.torchrec.replace(model)`` returned.
        device: of the copies that are saved and loaded.
    """

    def __init__(self, model: nn.Module, tables: ReplacedTables, device: torch.device = CPU) -> None:
        self._model: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self._tables = tables
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """Collective. Return the dense state, and each table as a DTensor [rows, dim] of blocks of rows."""
        with self._tables.left_out_of_state_dict():
            state: dict[str, Any] = dict(self._model.state_dict())
        saved = _saved(self._tables, _weights(self._tables), self._device)
        state |= {weight: value for (weight, _), value in saved.items()}
        return TableStates(state, _paths(self._tables, {key: (key[0],) for key in _weights(self._tables)}))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Collective. Load the dense state and the tables. The optimizer state of the rows does not change.

        Raises:
            CheckpointError: on every rank, if a table is missing on any or is of another shape or dtype.
        """
        weights = _weights(self._tables)
        _load(self._tables, weights, {key: state[key[0]] for key in weights if key[0] in state}, state)
        with self._tables.left_out_of_state_dict():
            self._model.load_state_dict({key: value for key, value in state.items() if (key, "") not in weights})


class FusedOptimizerState:
    """The state of the rows' optimizer, as ``DistributedModelParallel.fused_optimizer`` has it; see ``ModelState``.

    Args:
        tables: what ``flexd.torchrec.replace(model)`` returned.
        steps: number of steps that trained the state which is loaded. TorchRec does not save it; Adam's correction of
            its moments needs it.
        device: of the copies that are saved and loaded.
    """

    def __init__(self, tables: ReplacedTables, *, steps: int | None = None, device: torch.device = CPU) -> None:
        self._tables = tables
        self._steps = steps
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """Collective. Return {"state": {weight: {"<table>.momentum1": DTensor [rows, dim] or [rows], ...}}}."""
        state: dict[str, dict[str, torch.Tensor]] = {weight: {} for weight, _ in _weights(self._tables)}
        for (weight, name), value in _saved(self._tables, _states(self._tables), self._device).items():
            state[weight][name] = value
        paths = {(weight, name): ("state", weight, name) for weight, name in _states(self._tables)}
        return TableStates({"state": state}, _paths(self._tables, paths))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Collective. Load the state of all tables, and the number of steps if it was given.

        Raises:
            CheckpointError: on every rank, if state is missing on any or is of another shape or dtype; Adam's state
                without ``steps``.
        """
        groups = self._tables.keyspace.groups
        counted = [group.optimizer for group in groups if group.trained and group.optimizer in _NEEDS_STEPS]
        if self._steps is None and counted:
            raise CheckpointError(
                f"the state of {counted[0]} without the number of steps, which TorchRec does not save",
                remedy="FusedOptimizerState(tables, steps=...)",
            )
        found, states = state.get("state", {}), _states(self._tables)
        given = {(weight, name): found[weight][name] for weight, name in states if name in found.get(weight, {})}
        _load(self._tables, states, given, state)
        if self._steps is not None:
            self._tables.engine.steps = self._steps


# Name of a weight, and of a part of its optimizer's state; "" for the weight itself.
_Key = tuple[str, str]


@dataclass(frozen=True)
class _Part:
    """Rows of a table, or a part of their optimizer state.

    Attributes:
        by_row: one number per row.
        rows: that a checkpoint has.
    """

    homes: TableHomes
    held: RowColumn
    by_row: bool
    rows: int

    @property
    def table(self) -> str:
        return self.homes.homes.keyspace.tables[self.homes.table].name

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows,) if self.by_row else (self.rows, self.held.shape[1])


def _weights(tables: ReplacedTables) -> dict[_Key, _Part]:
    return {key: part for key, part in _parts(tables).items() if not key[1]}


def _states(tables: ReplacedTables) -> dict[_Key, _Part]:
    return {key: part for key, part in _parts(tables).items() if key[1]}


def _parts(tables: ReplacedTables) -> dict[_Key, _Part]:
    if unbounded := tables.engine.admit_after:
        raise CheckpointError(
            f"tables {', '.join(sorted(unbounded))} have unbounded ids, and TorchRec's checkpoints do not say which "
            "have rows",
            remedy="flexd.ShardedState(tables) or flexd.CheckpointSeries(tables, directory)",
        )
    saved = {table.spec.name: table for table in whole_tables(tables)}
    found = {}
    for module in tables.replaced:
        for config, table in zip(module.configs, module.tables, strict=True):
            one, kind = saved[table.name], "embedding_bags" if module.pooled else "embeddings"
            weight = f"{module.path}.{kind}.{config.name}.weight"  # its name in TorchRec's ``state_dict`` of the model
            names = [("", False), *_NAMES_OF_STATE[one.spec.optimizer]]
            for (name, by_row), held in zip(names, one.columns.values(), strict=False):  # read only: the weight alone
                key = weight, f"{config.name}.{name}" if name else ""
                found[key] = _Part(one.homes, held, by_row, one.rows)
    return found


def _paths(tables: ReplacedTables, paths: Mapping[_Key, tuple[str, ...]]) -> TablePaths:
    found: dict[str, tuple[int, tuple[tuple[str, ...], ...]]] = {}
    for key, part in _parts(tables).items():
        if key in paths:
            found[part.table] = part.rows, (*found.get(part.table, (0, ()))[1], paths[key])
    return found


def _saved(tables: ReplacedTables, parts: Mapping[_Key, _Part], device: torch.device) -> dict[_Key, torch.Tensor]:
    agree_on_reading(tables.engine)
    state = {}
    with tables.traffic.uncounted(), torch.no_grad():
        for key, part in parts.items():
            (block,) = collect(tables.engine.groups.world, part.homes, [part.held], part.homes.blocks(), device)
            state[key] = as_dtensor(block.view(-1) if part.by_row else block, part.shape)
    return state


def _load(
    tables: ReplacedTables, parts: Mapping[_Key, _Part], state: Mapping[_Key, Any], whole: Mapping[str, Any]
) -> None:
    """Collective. Write blocks of rows, in the form of ``_saved``, to their homes.

    Args:
        whole: the state dict with which the caller was called.
    """
    faults = []
    if isinstance(whole, TableStates) and (saved_rows := whole.saved_rows) is not None:
        if tables.steps and any(saved_rows[part.table] < part.rows for part in parts.values()):
            faults = [f"new rows would begin with values of step {tables.steps}"]
            raise_if_any_rank_refuses(
                tables, faults, remedy="load the ModelState first, before any step, or call reset_parameters() before"
            )
        parts = {key: replace(part, rows=rows) for key, part in parts.items() if (rows := saved_rows[part.table])}
    for key, part in parts.items():
        name, expected, value = " ".join(key).strip(), (part.shape, part.held.dtype), state.get(key)
        is_whole = isinstance(value, DTensor) or (torch.is_tensor(value) and tables.layout.world_size == 1)
        if value is None or not is_whole:
            faults.append(f"{name} is {'missing' if value is None else f'a {type(value).__name__}, not a DTensor'}")
        elif (tuple(value.shape), value.dtype) != expected:
            faults.append(f"{name} is {tuple(value.shape)} {value.dtype}, not {expected[0]} {expected[1]}")
        elif block_of(value).shape[0] != len(part.homes.blocks(part.rows)[tables.rank]):
            faults.append(f"{name} is not divided into blocks of rows over all ranks")
    raise_if_any_rank_refuses(
        tables, faults,
        remedy="replace a model with the tables and optimizer of the checkpoint, or, for new and enlarged tables, load "
        "with dcp.load(..., planner=flexd.ChangedTables())",
    )  # fmt: skip
    tables.engine.before_rows_load()
    tables.drop_lookup()
    with tables.traffic.uncounted(), torch.no_grad():
        for key, part in parts.items():
            block = block_of(state[key]).view(-1, part.held.shape[1])
            distribute(tables.engine.groups.world, part.homes, [part.held], part.homes.blocks(part.rows), [block])
