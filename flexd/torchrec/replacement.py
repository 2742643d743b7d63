"""``flexd.torchrec.replace``: put flexd in the place of all TorchRec collections of a model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)
from torchrec.types import DataType

from flexd.core.errors import EmbeddingError
from flexd.embedding.collection import EmbeddingCollection as FlexdCollection
from flexd.embedding.embedding_table import UNBOUNDED
from flexd.embedding.row_optimizers import RowOptimizer
from flexd.torchrec.configs import attached_optimizers
from flexd.torchrec.managed_collisions import ReplacedManagedCollisions, load_managed, managed_collisions, write_managed
from flexd.torchrec.replaced_tables import (
    ReplacedEmbeddingBagCollection,
    ReplacedEmbeddingCollection,
    ReplacedModule,
    ReplacedTables,
    replaced_module,
)

# Rows that are copied at once: a copy of this rank's part of them is made.
_LOADED_ROWS = 1 << 20
_SHARDED = ("ShardedEmbeddingCollection", "ShardedEmbeddingBagCollection", "DistributedModelParallel")


def replace(
    model: nn.Module,
    *,
    optimizer: RowOptimizer | None = None,
    one_lookup: bool = True,
    admit_after: int = 1,
    device: torch.device | str | None = None,
    **arguments: Any,
) -> ReplacedTables:
    """Collective. Replace every ``torchrec.EmbeddingCollection`` and ``EmbeddingBagCollection`` of a model, in place.

    ::

        tables = flexd.torchrec.replace(model)      # instead of DistributedModelParallel(model)
        model = DistributedDataParallel(model)      # the dense part
        ...
        loss.backward()
        tables.optimizer.step()                     # TorchRec's fused optimizers step in backward()

    Tables keep their names (``path/name`` if modules before have a table of that name) and their values: each rank
    takes those of its home rows from its own module, so seed every rank alike. (``DistributedModelParallel`` does so
    with sequences, and draws the values of bags anew.)
    Those whose weight does not require gradients are read only.
    Collections in a ``ManagedCollisionEmbeddingCollection`` or ``ManagedCollisionEmbeddingBagCollection`` become tables
    of unbounded ids in the place of both; ids that their modules know keep their rows.
    Modules on ``meta`` are initialised by ``init_fn`` with ``seed``. All modules share one collection, and with it one
    connection (``flexd.connect(tables)``), one ``flexd.prefetch(loader, tables)`` and one optimizer.

    Args:
        optimizer: of all rows; default those that ``apply_optimizer_in_backward`` attached to the tables.
        one_lookup: the first module that is called looks up the rows of all; every pass calls every module, with the
            same ``KeyedJaggedTensor`` object. With False each module looks up its own rows, in more collectives and
            without ``flexd.prefetch``, which then looks up every batch in vain.
        admit_after: of tables of unbounded ids, as of ``flexd.EmbeddingTable``.
        device: of the tables; default the modules', and torch's default device for modules on ``meta``.
        arguments: keyword arguments of ``flexd.EmbeddingBagCollection``, ``pooling_at`` by name of a table among them.

    Returns:
        The collection of all tables; ``replaced`` has the modules, with their names in the model. It is saved in the
        model's ``state_dict``.

    Raises:
        EmbeddingError: the model has no such module, or one that flexd cannot replace with the same result: it is
            sharded, quantised or of a subclass, a table has an unsupported property, values that are not its
            configuration's, or an optimizer of the same kind as another's with other settings beside ``lr``. The model
            is unchanged.
        TopologyError: see ``flexd.EmbeddingCollection``.
    """
    places = _places(model)
    found: dict[int, tuple[str, Any]] = {}
    managed = managed_collisions(model)
    for path, module in places:
        found.setdefault(id(module), (path, module))
    unbounded: dict[str, tuple[Any, str]] = {}
    modules: list[ReplacedModule] = []
    weights: dict[str, nn.Parameter] = {}
    taken: dict[str, str] = {}
    for path, module in found.values():
        one = _described(path, module, taken)
        modules.append(one)
        taken |= dict.fromkeys([*one.table_names, *(lookup.name for lookup in one.lookups)], path)
        weights |= zip(one.table_names, _weights(path, module), strict=True)
        if (outside := managed.get(path)) is not None:
            unbounded |= {t.name: (outside, c.name) for t, c in zip(one.tables, one.configs, strict=True)}
    loaded = frozenset(name for name, weight in weights.items() if weight.device.type != "meta")
    if device is None and loaded:
        device = weights[min(loaded)].device
    rule, modules = _with_optimizers(modules, weights) if optimizer is None else (optimizer, modules)
    read_only = {name for name, weight in weights.items() if not weight.requires_grad}
    modules = [
        dataclasses.replace(
            module,
            tables=tuple(
                dataclasses.replace(
                    table, trainable=table.name not in read_only, **_ids_of(table.name in unbounded, admit_after)
                )
                for table in module.tables
            ),
        )
        for module in modules
    ]
    tables = ReplacedTables(modules, optimizer=rule, one_lookup=one_lookup, device=device, loaded=loaded, **arguments)
    for name, weight in weights.items():  # collective: in the same order on every rank, which a set has not
        if name in unbounded:
            load_managed(tables, name, *unbounded[name], weight.detach())
        elif name in loaded:
            for first in range(0, weight.shape[0], _LOADED_ROWS):
                tables.load_rows(name, first, weight.detach()[first : first + _LOADED_ROWS])
    _swap(model, places, tables, dict(zip(found, modules, strict=True)))
    for path in managed:
        outside, _, _ = path.rpartition(".")
        parent, _, name = outside.rpartition(".")
        setattr(model.get_submodule(parent), name, ReplacedManagedCollisions(model.get_submodule(path)))
    return tables


@torch.no_grad()
def restore(model: nn.Module, tables: ReplacedTables) -> None:
    """Collective. Write rows, and the ids that have them, into a model of TorchRec's modules, as before ``replace``.

    ::

        exported = Model()                          # as it was before replace(), on each rank
        flexd.torchrec.restore(exported, tables)
        torch.save(exported.state_dict(), path)     # on one

    Each rank's model holds whole tables. Optimizer state stays behind.

    Args:
        model: with the same tables as the model that was replaced.

    Raises:
        EmbeddingError: it has other tables, or a module of managed collisions that cannot know their ids. Tables before
            that one are written then.
    """
    found: dict[int, tuple[str, Any]] = {}
    for path, module in _places(model):
        found.setdefault(id(module), (path, module))
    managed, taken = managed_collisions(model), dict[str, str]()
    sizes = {table.name: (table.rows, table.dim) for table in tables.tables}
    written: list[tuple[str, nn.Parameter, tuple[Any, str] | None]] = []
    for path, module in found.values():
        one = _described(path, module, taken)
        taken |= dict.fromkeys([*one.table_names, *(lookup.name for lookup in one.lookups)], path)
        outside = managed.get(path)
        for name, config, weight in zip(one.table_names, one.configs, _weights(path, module), strict=True):
            if sizes.get(name) != tuple(weight.shape):
                raise EmbeddingError(
                    f"{path}: table {name!r} has shape {tuple(weight.shape)}, the replaced ones: {sizes}"[:500],
                    remedy="construct the model as before replace()",
                )
            written.append((name, weight, None if outside is None else (outside, config.name)))
    for name, weight, known in written:
        if known is not None:
            write_managed(tables, name, *known)
        weight.copy_(tables.gather_table(name))


def _ids_of(is_unbounded: bool, admit_after: int) -> dict[str, Any]:
    return {"ids": UNBOUNDED, "admit_after": admit_after} if is_unbounded else {}


def _with_optimizers(
    modules: list[ReplacedModule], weights: Mapping[str, nn.Parameter]
) -> tuple[RowOptimizer, list[ReplacedModule]]:
    """Return the optimizer of the first table, and the modules with those of other tables."""
    rules = attached_optimizers(weights)
    first = next(iter(rules.values()))
    return first, [
        dataclasses.replace(
            module,
            tables=tuple(
                table if rules[table.name] == first else dataclasses.replace(table, optimizer=rules[table.name])
                for table in module.tables
            ),
        )
        for module in modules
    ]


def _places(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (path, module) of the collections; one that is used in several places has several paths.

    Raises:
        EmbeddingError: there are none, or some that cannot be replaced.
    """
    places: list[tuple[str, Any]] = []
    for path, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        if kind in (EmbeddingCollection, EmbeddingBagCollection):
            if not path:
                raise EmbeddingError(
                    f"the model is itself a torchrec.{kind.__name__} and has no place where to put another",
                    remedy=f"construct flexd.torchrec.Flex{kind.__name__}",
                )
            places.append((path, module))
        elif kind.__name__ in _SHARDED:
            raise EmbeddingError(
                f"{path or 'the model'} is a {kind.__name__}",
                remedy="replace the collections of the model instead of DistributedModelParallel",
            )
        elif isinstance(module, EmbeddingCollectionInterface | EmbeddingBagCollectionInterface):
            if isinstance(module, FlexdCollection | ReplacedEmbeddingCollection | ReplacedEmbeddingBagCollection):
                continue
            raise EmbeddingError(
                f"{path or 'the model'} is a {kind.__module__}.{kind.__name__}, which is not replaced",
                remedy="use torchrec.EmbeddingCollection or torchrec.EmbeddingBagCollection in its place",
            )
    if not places:
        raise EmbeddingError(
            f"{type(model).__name__} has no torchrec.EmbeddingCollection or EmbeddingBagCollection",
            remedy="give the model that contains them, before any is sharded",
        )
    return places


def _described(path: str, module: Any, taken: Mapping[str, str]) -> ReplacedModule:
    pooled = not isinstance(module, EmbeddingCollection)
    return replaced_module(
        path, module.embedding_bag_configs() if pooled else module.embedding_configs(), taken, pooled=pooled,
        need_indices=not pooled and module.need_indices(), is_weighted=pooled and module.is_weighted(),
        loaded=all(weight.device.type != "meta" for weight in _weights(path, module)),
    )  # fmt: skip


def _weights(path: str, module: Any) -> list[nn.Parameter]:
    """Return the weight of each table.

    Raises:
        EmbeddingError: a weight is not a plain tensor of the table's shape and dtype.
    """
    if isinstance(module, EmbeddingCollection):
        configs, tables = list(module.embedding_configs()), module.embeddings
    else:
        configs, tables = list(module.embedding_bag_configs()), module.embedding_bags
    weights = []
    for config in configs:
        weight = tables[config.name].weight
        shape = config.num_embeddings, config.embedding_dim
        # TorchRec makes float16 weights for every data type but FP32.
        dtypes = (torch.float32,) if config.data_type == DataType.FP32 else (torch.float16, torch.bfloat16)
        if type(weight.data) is not torch.Tensor or tuple(weight.shape) != shape or weight.dtype not in dtypes:
            raise EmbeddingError(
                f"{path}, table {config.name!r}: its weight is a {type(weight.data).__name__} of shape "
                f"{tuple(weight.shape)} and {weight.dtype}, its configuration has {shape} and {config.data_type}",
                remedy="replace the collections before the model is sharded or converted to another dtype",
            )
        weights.append(weight)
    return weights


def _swap(
    model: nn.Module,
    places: list[tuple[str, Any]],
    tables: ReplacedTables,
    modules: Mapping[int, ReplacedModule],
) -> None:
    made: dict[int, nn.Module] = {}
    for path, module in places:
        if id(module) not in made:
            one = modules[id(module)]
            kind = ReplacedEmbeddingBagCollection if one.pooled else ReplacedEmbeddingCollection
            new = kind(tables, one)
            if not made:
                new.tables = tables
            made[id(module)] = new.train(module.training)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, made[id(module)])
