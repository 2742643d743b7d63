"""``flexd.embed_all``: move the ``nn.Embedding`` modules of a model into one collection, in place."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flexd.core.errors import EmbeddingError
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.embedding import Embedding, dtype_name


def embed_all(model: nn.Module, *, names: Collection[str] | None = None, **settings: Any) -> EmbeddingCollection:
    """Collective. Replace ``nn.Embedding`` modules of a model by ``flexd.Embedding`` of one collection, in place.

    ::

        tables = flexd.embed_all(model, names=["item_embedding"], optimizer=flexd.DenseAdam(1e-3))
        optimizer = flexd.JoinedOptimizer(torch.optim.Adam(model.parameters(), 1e-3), tables.optimizer)

    Rows begin with the values of the modules on rank 0, as with ``DistributedDataParallel``. Each table has the path of
    its module as name; the first of the new modules has the collection as submodule. Call it after ``model.to(device)``
    and before the model is wrapped and dense optimizers are made.

    Args:
        names: paths of the modules to replace; default: all ``nn.Embedding`` modules, also small ones (positions, say),
            which are better left in the dense part.
        settings: keyword arguments of ``EmbeddingCollection``, except tables and device.

    Raises:
        EmbeddingError: there is no such module, or one cannot be replaced: it is in a wrapper of the model, is frozen,
            shares its weight, or has ``max_norm`` or ``scale_grad_by_freq``. The model is unchanged then.
    """
    modules = _modules_of(model, names)
    for module, paths in modules.items():
        _check(model, module, paths)
    devices = {module.weight.device for module in modules}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise EmbeddingError(
            f"embed_all: modules on {', '.join(sorted(map(str, devices)))}", remedy="move the model to one device first"
        )
    tables = [
        EmbeddingTable(paths[0], module.num_embeddings, module.embedding_dim, dtype=dtype_name(module.weight.dtype))
        for module, paths in modules.items()
    ]
    collection = EmbeddingCollection(tables, device=devices.pop(), **settings)
    for module, paths in modules.items():
        collection.load_rows(paths[0], 0, module.weight.detach(), source=0)
        embedding = Embedding.of(collection, paths[0], module.padding_idx).train(module.training)
        if paths[0] == tables[0].name:
            embedding.register_collection()
        for path in paths:
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, embedding)
    return collection


def _modules_of(model: nn.Module, names: Collection[str] | None) -> dict[nn.Embedding, list[str]]:
    """Return the modules to replace, with all paths of each."""
    if isinstance(model, DistributedDataParallel):
        raise EmbeddingError(
            "embed_all: the model is in DistributedDataParallel, which has its parameters already",
            remedy="call embed_all before wrapping the model",
        )
    every = {path: module for path, module in model.named_modules(remove_duplicate=False) if path}
    unknown = [name for name in names or () if not isinstance(every.get(name), nn.Embedding)]
    # A subclass may look rows up in another way, so it must be named.
    chosen = [path for path, module in every.items() if type(module) is nn.Embedding] if names is None else list(names)
    if unknown or not chosen:
        known = ", ".join(path for path, module in every.items() if isinstance(module, nn.Embedding))
        raise EmbeddingError(
            f"embed_all: no nn.Embedding at {', '.join(unknown)}" if unknown else "embed_all: no nn.Embedding",
            remedy=f"one of {known}" if known else "make flexd.Embedding modules in the model",
        )
    modules: dict[nn.Embedding, list[str]] = {}
    for path in chosen:
        module = every[path]
        assert isinstance(module, nn.Embedding)  # noqa: S101
        modules[module] = [other for other, found in every.items() if found is module]
    return modules


def _check(model: nn.Module, module: nn.Embedding, paths: list[str]) -> None:
    where = f"embed_all: {paths[0]}"
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise EmbeddingError(f"{where} has max_norm or scale_grad_by_freq", remedy="not supported: leave them out")
    if not module.weight.requires_grad:
        raise EmbeddingError(f"{where} is frozen", remedy="leave it in the dense part: give names= without it")
    own = {f"{path}.weight" for path in paths}
    shared = [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter is module.weight and name not in own
    ]
    if shared:
        raise EmbeddingError(
            f"{where} shares its weight with {', '.join(shared)}",
            remedy="read the embedding's .weight in the forward pass instead",
        )
