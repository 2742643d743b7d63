"""TorchRec's ``ShardingPlan`` from the document that ``flexd shard`` writes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    get_module_to_default_sharders,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

from flexd.core.errors import EmbeddingError
from flexd.core.sharding_types import DOCUMENT_FORMAT


def sharding_plan(
    model: nn.Module, document: Mapping[str, Any] | str | Path, *, device_type: str | None = None
) -> ShardingPlan:
    """Local. Return the plan to hand to ``DistributedModelParallel``.

    ::

        plan = flexd.torchrec.sharding_plan(model, "sharding.json")
        model = DistributedModelParallel(model, plan=plan)

    Args:
        document: what ``flexd shard`` wrote, or its path.
        device_type: of the shards; default: "cuda" where it is available, else "cpu".

    Raises:
        EmbeddingError: the document is not of this model: another table, rank or format; names it.
    """
    if not isinstance(document, Mapping):
        document = _read(Path(document))
    if document.get("for") == "flexd":
        raise EmbeddingError(
            "sharding types for flexd's trainer in place of a sharding plan",
            remedy="flexd.torchrec.replace(model, rules=...), or write a plan by flexd shard --for torchrec",
        )
    if document.get("format") != DOCUMENT_FORMAT:
        raise EmbeddingError(
            f"sharding plan of format {document.get('format')!r}", remedy=f"format {DOCUMENT_FORMAT}: write it again"
        )
    try:
        nodes, local_ranks = int(document["nodes"]), int(document["local_ranks"])
        modules = {
            path: {name: dict(entry) for name, entry in entries.items()}
            for path, entries in document["modules"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EmbeddingError(f"sharding plan is damaged: {error!r}", remedy="write it again by flexd shard") from error
    sharders = get_module_to_default_sharders()
    collections = {path: module for path, module in model.named_modules() if type(module) in sharders}
    if list(modules) == [""] and "" not in collections and len(collections) == 1:
        modules = {next(iter(collections)): modules[""]}  # of a list of configurations, which knows no path
    _same("collections", set(collections), set(modules))
    plan = {}
    for path, module in collections.items():
        entries = modules[path]
        names = list(sharders[type(module)].shardable_parameters(module))
        _same(f"tables of {path or 'the collection'}", set(names), set(entries))
        generators = {name: _generator(name, entries[name], nodes, local_ranks) for name in names}
        plan[path] = construct_module_sharding_plan(
            module, generators, local_size=local_ranks, world_size=nodes * local_ranks, device_type=device_type
        )
    return ShardingPlan(plan=plan)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EmbeddingError(f"{path}: no sharding plan: {error}", remedy="write it by flexd shard") from error
    if not isinstance(document, dict):
        raise EmbeddingError(f"{path}: no sharding plan", remedy="write it by flexd shard")
    return document


def _same(what: str, ours: set[str], planned: set[str]) -> None:
    missing, unknown = sorted(ours - planned), sorted(planned - ours)
    if missing or unknown:
        raise EmbeddingError(
            f"{what}: the plan lacks {', '.join(map(repr, missing)) or 'none'}, "
            f"the model {', '.join(map(repr, unknown)) or 'none'}",
            remedy="plan the tables of this model again by flexd shard",
        )


def _generator(name: str, entry: Mapping[str, Any], nodes: int, local_ranks: int) -> Any:
    kind, ranks = entry.get("sharding_type"), entry.get("ranks")
    fits = isinstance(ranks, list) and all(isinstance(rank, int) and 0 <= rank < nodes * local_ranks for rank in ranks)
    if not ranks or not fits:
        raise EmbeddingError(
            f"table {name!r}: ranks {ranks} of {nodes * local_ranks}", remedy="plan for this number of ranks"
        )
    generators = {
        "table_wise": table_wise(rank=ranks[0]),
        "column_wise": column_wise(ranks=ranks),
        "table_row_wise": table_row_wise(host_index=ranks[0] // local_ranks),
        "row_wise": row_wise(),
        "data_parallel": data_parallel(),
    }
    if kind not in generators:
        raise EmbeddingError(f"table {name!r}: sharding type {kind!r}", remedy="plan again by flexd shard")
    return generators[kind]
