"""TorchRec's collections with managed collisions (ZCH), replaced by tables of unbounded ids."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flexd.core.errors import EmbeddingError
from flexd.embedding.collection import EmbeddingCollection

logger = logging.getLogger(__name__)

_INNER = "_embedding_module"
_NO_ID = torch.iinfo(torch.int64).max


def managed_collisions(model: nn.Module) -> dict[str, BaseManagedCollisionEmbeddingCollection]:
    """Return the collections with managed collisions of a model, by the path of the collection inside.

    Raises:
        EmbeddingError: one returns what flexd does not, or is the model, or its collection is used elsewhere too.
    """
    found = {}
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
        if not isinstance(module, BaseManagedCollisionEmbeddingCollection):
            continue
        where = path or "the model"
        if not path or module._return_remapped_features:
            raise EmbeddingError(
                f"{where} is a {type(module).__name__}"
                + (" with return_remapped_features" if path else " and has no place where to put another"),
                remedy="leave return_remapped_features out, and give the model that contains it",
            )
        found[f"{path}.{_INNER}"] = module
    for inner, module in found.items():
        others = [path for path in paths[id(getattr(module, _INNER))] if path not in found]
        if others:
            raise EmbeddingError(
                f"{inner} is also used at {', '.join(others)}, without managed collisions",
                remedy="give each a collection of its own",
            )
    return found


def load_managed(
    tables: EmbeddingCollection,
    name: str,
    module: BaseManagedCollisionEmbeddingCollection,
    table: str,
    weight: torch.Tensor,
) -> None:
    """Collective. Give the ids that a module knows their rows.

    Args:
        name: of the table in ``tables``.
        table: its name in the module.
        weight: its rows in the module, equal on all ranks.
    """
    known = module._managed_collision_collection._managed_collision_modules[table]
    ids = getattr(known, "_mch_sorted_raw_ids", None)
    mine, rows = torch.empty(0, dtype=torch.int64), weight.new_empty((0, weight.shape[1]), device="cpu")
    if ids is not None and not ids.is_meta and not weight.is_meta:
        used = (ids != _NO_ID).nonzero().view(-1)
        if known._input_hash_func is not None and len(used):
            logger.warning("table %r: its %d ids were hashed by input_hash_func; all begin anew", name, len(used))
        else:
            used = used[tables.rank :: tables.layout.world_size]
            mine, rows = ids[used], weight[known._mch_remapped_ids_mapping[used] - known._output_global_offset]
    found = tables.load_ids(name, mine.to(tables.device), rows.to(tables.device))
    if lost := int((found < 0).sum()):
        logger.warning("table %r: %d ids of its module have no row of their own", name, lost)


def write_managed(
    tables: EmbeddingCollection, name: str, module: BaseManagedCollisionEmbeddingCollection, table: str
) -> None:
    """Collective. Let a module know the ids that have rows, as those of the same number.

    Args:
        name: of the table in ``tables``.
        table: its name in the module.

    Raises:
        EmbeddingError: the module knows ids by a hash, or has another number of rows.
    """
    known = module._managed_collision_collection._managed_collision_modules[table]
    size = next(one.rows for one in tables.tables if one.name == name)
    if known._input_hash_func is not None or known._zch_size != size:
        raise EmbeddingError(
            f"the module of table {name!r} has {known._zch_size} rows"
            + (" and an input_hash_func" if known._input_hash_func is not None else ""),
            remedy=f"construct it with zch_size={size} and without input_hash_func",
        )
    rows = torch.arange(size, device=tables.device)
    ids, has = (each.to(known._mch_sorted_raw_ids.device) for each in tables.ids_of(name, rows))
    order = torch.where(has, ids, _NO_ID).argsort(stable=True)
    known._mch_sorted_raw_ids.copy_(torch.where(has, ids, _NO_ID)[order])
    known._mch_remapped_ids_mapping.copy_(order + known._output_global_offset)
    for metadata in known._mch_metadata.values():
        metadata.copy_(has[order])


class ReplacedManagedCollisions(nn.Module):
    """Stands for a ``ManagedCollisionEmbeddingCollection`` or ``ManagedCollisionEmbeddingBagCollection``."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self._embedding_module = replaced

    def forward(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True) -> tuple[Any, None]:
        """Return the rows of the ids, as TorchRec's, and None. Ids without one read the shared row and are not left
        out."""
        del mutate_miss_lengths
        return self._embedding_module(features), None
