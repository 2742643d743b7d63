"""Checkpoints of ``DistributedModelParallel``: read into replaced tables, and written so that it can read them.

They have a tensor for each table under the name of its weight in the model, and one for each part of the state of the
fused optimizer, sharded in any way. ``torch.distributed.checkpoint`` reads from them the block of rows that a rank asks
for, so no rank has a whole table. A save and a load need the memory of one more copy of this rank's share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from flexd.core.errors import CheckpointError
from flexd.embedding.checkpoint.blocks import from_block, to_block
from flexd.embedding.checkpoint.checkpoint import as_dtensor, block_of, raise_if_any_rank_refuses
from flexd.embedding.checkpoint.saved_tables import Column, saved_tables
from flexd.torchrec.replaced_tables import ReplacedModule, ReplacedTables

_CPU = torch.device("cpu")
_NAMES_OF_STATE: dict[str, tuple[tuple[str, bool], ...]] = {
    "sgd": (),
    "adagrad": (("momentum1", False),),
    "rowwise_adagrad": (("momentum1", True),),
    "adam": (("momentum1", False), ("exp_avg_sq", False)),
    "rowwise_adam": (("momentum1", False), ("exp_avg_sq", True)),
}
"""Of each optimizer TorchRec's names of its state, in the order of flexd's, and whether it is one number per row."""
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

    def __init__(self, model: nn.Module, tables: ReplacedTables, device: torch.device = _CPU) -> None:
        self._model: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self._tables = tables
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """Collective. Return the dense state, and each table as a DTensor [rows, dim] of blocks of rows."""
        with self._tables.left_out_of_state_dict():
            state: dict[str, Any] = dict(self._model.state_dict())
        weights = {module.weight_key(config): columns[0] for module, config, columns in _columns(self._tables)}
        return state | _saved(self._tables, {key: (column, False) for key, column in weights.items()}, self._device)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Collective. Load the dense state and the tables. The optimizer state of the rows does not change.

        Raises:
            CheckpointError: on every rank, if a table is missing on any or is of another shape or dtype.
        """
        weights = {module.weight_key(config): columns[0] for module, config, columns in _columns(self._tables)}
        _load(self._tables, {key: (column, False) for key, column in weights.items()}, state)
        with self._tables.left_out_of_state_dict():
            self._model.load_state_dict({key: value for key, value in state.items() if key not in weights})


class FusedOptimizerState:
    """The state of the rows' optimizer, as ``DistributedModelParallel.fused_optimizer`` has it; see ``ModelState``.

    Args:
        tables: what ``flexd.torchrec.replace(model)`` returned.
        steps: number of steps that trained the state which is loaded. TorchRec does not save it; Adam's correction of
            its moments needs it.
        device: of the copies that are saved and loaded.
    """

    def __init__(self, tables: ReplacedTables, *, steps: int | None = None, device: torch.device = _CPU) -> None:
        self._tables = tables
        self._steps = steps
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """Collective. Return {"state": {weight: {"<table>.momentum1": DTensor [rows, dim] or [rows], ...}}}."""
        saved = _saved(self._tables, {key: named for key, named, _, _ in self._entries()}, self._device)
        state: dict[str, dict[str, torch.Tensor]] = {
            module.weight_key(config): {} for module, config, _ in _columns(self._tables)
        }
        for key, _, weight, name in self._entries():
            state[weight][name] = saved[key]
        return {"state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Collective. Load the state of all tables, and the number of steps if it was given.

        Raises:
            CheckpointError: on every rank, if state is missing on any or is of another shape or dtype; Adam's state
                without ``steps``.
        """
        counted = [table.optimizer for table in self._tables.keyspace.tables if table.optimizer in _NEEDS_STEPS]
        if self._steps is None and counted:
            raise CheckpointError(
                f"the state of {counted[0]} without the number of steps, which TorchRec does not save",
                remedy="FusedOptimizerState(tables, steps=...)",
            )
        found = state.get("state", {})
        given = {key: found[weight][name] for key, _, weight, name in self._entries() if name in found.get(weight, {})}
        _load(self._tables, {key: named for key, named, _, _ in self._entries()}, given)
        if self._steps is not None:
            self._tables.engine.steps = self._steps

    def _entries(self) -> Iterator[tuple[str, tuple[Column, bool], str, str]]:
        """Yield (key, (column, one number per row), name of the weight, name of the state)."""
        for module, config, columns in _columns(self._tables):
            weight = module.weight_key(config)
            for (name, by_row), column in zip(_NAMES_OF_STATE[columns[0].spec.optimizer], columns[1:], strict=True):
                yield f"{weight} {name}", (column, by_row), weight, f"{config.name}.{name}"


def _columns(tables: ReplacedTables) -> Iterator[tuple[ReplacedModule, BaseEmbeddingConfig, list[Column]]]:
    of_table = {table.spec.name: table.columns for table in saved_tables(tables)}
    for module in tables.replaced:
        for config, table in zip(module.configs, module.tables, strict=True):
            yield module, config, of_table[table.name]


def _shape(column: Column, by_row: bool) -> tuple[int, ...]:
    return column.shape[:1] if by_row else column.shape


def _saved(
    tables: ReplacedTables, columns: Mapping[str, tuple[Column, bool]], device: torch.device
) -> dict[str, torch.Tensor]:
    tables.engine.settle()
    state = {}
    with tables.traffic.uncounted(), torch.no_grad():
        for key, (column, by_row) in columns.items():
            block = to_block(tables.engine.groups.world, column.homes, column.held, device)
            state[key] = as_dtensor(block.view(-1) if by_row else block, _shape(column, by_row))
    return state


def _load(tables: ReplacedTables, columns: Mapping[str, tuple[Column, bool]], state: Mapping[str, Any]) -> None:
    """Collective. Write blocks of rows, in the form of ``_saved``, to their homes."""
    faults = []
    for key, (column, by_row) in columns.items():
        expected, value = (_shape(column, by_row), column.held.dtype), state.get(key)
        whole = isinstance(value, DTensor) or (torch.is_tensor(value) and tables.layout.world_size == 1)
        if value is None or not whole:
            faults.append(f"{key} is {'missing' if value is None else f'a {type(value).__name__}, not a DTensor'}")
        elif (tuple(value.shape), value.dtype) != expected:
            faults.append(f"{key} is {tuple(value.shape)} {value.dtype}, not {expected[0]} {expected[1]}")
        elif block_of(value).shape[0] != len(column.homes.block(tables.rank)):
            faults.append(f"{key} is not divided into blocks of rows over all ranks")
    raise_if_any_rank_refuses(tables, faults, remedy="replace a model with the tables and optimizer of the checkpoint")
    tables.engine.before_rows_load()
    tables.drop_lookup()
    with tables.traffic.uncounted(), torch.no_grad():
        for key, (column, _) in columns.items():
            block = block_of(state[key]).view(-1, column.shape[1])
            from_block(tables.engine.groups.world, column.homes, block, column.held)
