"""Loading into a model whose tables have changed since the checkpoint: some are new, gone, or have more rows.

``flexd.ChangedTables`` is a planner of ``torch.distributed.checkpoint``, whose own planners refuse missing keys and
other shapes: before the load is planned it makes the state that is loaded into as large as the saved one. What the
checkpoint lacks keeps its values, which of a new collection are those of its seed.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)

_WEIGHT = re.compile(r"(?:.*\.)?(?:embeddings|embedding_bags)\.(.+)\.weight")

TablePaths = Mapping[str, tuple[int, tuple[tuple[str, ...], ...]]]
"""By the name of each table of a collection: its rows, and where its tensors are in the nested state, on any rank."""


class TableStates(dict[str, Any]):
    """A state dict that knows which of its tensors belong to which table. It is pickled as a plain one.

    Attributes:
        saved_rows: of each table, in the checkpoint that was loaded with ``ChangedTables``; None: all rows are there.
    """

    def __init__(self, state: Mapping[str, Any], paths: TablePaths) -> None:
        super().__init__(state)
        self.paths = paths
        self.saved_rows: dict[str, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())

    def fit(self, prefix: str, saved: Mapping[str, Any]) -> list[str]:
        """Remove what a checkpoint lacks and shorten what it has fewer rows of; return how the tables differ.

        Args:
            prefix: of the keys of this state in the checkpoint.
            saved: of each of its keys the metadata.
        """
        self.saved_rows, changes = {}, []
        known: set[str] = set()
        for table, (rows, paths) in self.paths.items():
            found = {path: saved.get(prefix + ".".join(path)) for path in paths}
            known.update(".".join(path) for path in paths)
            sizes = [each.size for each in found.values() if isinstance(each, TensorStorageMetadata) and each.size]
            self.saved_rows[table] = min((size[0] for size in sizes), default=0)
            if not any(found.values()):
                changes.append(f"{table} is new")
                for path in paths:
                    _remove(self, path)
            elif self.saved_rows[table] < rows:
                changes.append(f"{table} has {rows} rows instead of {self.saved_rows[table]}")
                for path in paths:
                    _shorten(self, path, self.saved_rows[table])
        for key in saved:
            own = key.removeprefix(prefix)
            gone = _WEIGHT.fullmatch(own) if key.startswith(prefix) else None
            if gone and own not in known and own not in self:
                changes.append(f"{gone[1]} is left out")
        return changes


class ChangedTables(DefaultLoadPlanner):
    """Planner with which ``torch.distributed.checkpoint.load`` loads a checkpoint of other tables::

        dcp.load({"model": model, "tables": flexd.ShardedState(embedding)}, checkpoint_id=path,
                 planner=flexd.ChangedTables())

    New tables, and rows behind those that a table had, begin from their seed, with fresh optimizer state; tables that
    the collection lacks are left out. A warning names them. It is for ``ShardedState`` and ``flexd.torchrec``'s
    ``ModelState`` and ``FusedOptimizerState``; everything else is loaded as by torch's ``DefaultLoadPlanner``. Tables
    with fewer rows, another dim, dtype or optimizer are refused.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Fit the state to the checkpoint; called by ``torch.distributed.checkpoint``."""
        for prefix, states in _states_in(state_dict, ""):
            changes = states.fit(prefix, {} if metadata is None else metadata.state_dict_metadata)
            if changes and is_coordinator:
                logger.warning("the checkpoint is of other tables: %s", "; ".join(changes))
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _states_in(state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, TableStates]]:
    for key, value in state.items():
        inside = f"{prefix}{key}."
        if isinstance(value, TableStates):
            yield inside, value
        elif isinstance(value, Mapping):
            yield from _states_in(value, inside)


def _remove(state: dict[str, Any], path: tuple[str, ...]) -> None:
    """Remove a value, and what is empty without it, which the planner would look for."""
    if len(path) > 1 and path[0] in state:
        _remove(state[path[0]], path[1:])
        if state[path[0]]:
            return
    state.pop(path[0], None)


def _shorten(state: dict[str, Any], path: tuple[str, ...], rows: int) -> None:
    """Replace a tensor by one of so many rows; other ranks may have it."""
    for name in path[:-1]:
        state = state.get(name, {})
    value = state.get(path[-1])
    if value is None or not value.dim():
        return
    shape = torch.Size((rows, *value.shape[1:]))
    if not isinstance(value, DTensor):
        state[path[-1]] = value.new_empty(shape)
        return
    mesh = value.device_mesh
    each = -(-rows // mesh.size())
    of_rank = min(each, max(0, rows - each * mesh.get_local_rank()))
    state[path[-1]] = DTensor.from_local(
        value.to_local().new_empty((of_rank, *shape[1:])), mesh, value.placements, run_check=False, shape=shape,
        stride=(*shape[1:], 1),
    )  # fmt: skip
