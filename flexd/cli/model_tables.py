"""Tables of a model that a Python function returns, as TorchRec's planner would read them.

TorchRec is not imported here: its collections and configurations are known by their attributes.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexd.core.errors import ConfigError
from flexd.planner.tables.sharding import ListedTable, read_tables

DTYPES = {"FP32": "float32", "FP16": "float16", "BF16": "bfloat16"}
"""Names of TorchRec's DataType; others cannot be priced."""
_REMEDY = (
    "return a model, an EmbeddingBagCollection, a list of its configurations, or one of them with constraints, with a "
    "ShardingPlan, or with both"
)


def tables_of_source(source: str, batch: int) -> list[ListedTable]:
    """Return the tables of a file, or of the function ``module:function``.

    Args:
        batch: samples of a rank, where the function's constraints name none.

    Raises:
        ConfigError: there is no such file, module or function, or it has no tables.
    """
    if Path(source).exists() or ":" not in source:
        return read_tables(Path(source))
    return tables_of_model(_called(source), source, batch)


def _called(source: str) -> Any:
    module_name, _, function_name = source.partition(":")
    # As `python -m` does: modules of the working directory are found.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{source}: module {module_name!r} cannot be imported: {type(error).__name__}: {error}",
            remedy="run the command where the training's modules and TorchRec are installed",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{source}: {module_name} has no function {function_name!r}", remedy="name a function")
    try:
        return function()
    except Exception as error:
        raise ConfigError(f"{source}: {type(error).__name__}: {error}", remedy="call it yourself first") from error


def tables_of_model(found: Any, source: str, batch: int) -> list[ListedTable]:
    """Return the tables of a model, collection or configurations.

    Args:
        found: may be a tuple of it with the constraints of TorchRec's planner, with its ``ShardingPlan``, or with both.

    Raises:
        ConfigError: it has no tables, one of a dtype that cannot be priced, or a plan that leaves tables out.
    """
    constraints: Mapping[str, Any] = {}
    plan: Mapping[str, Any] | None = None
    if isinstance(found, tuple) and len(found) > 1 and all(map(_beside_a_model, found[1:])):
        found, *beside = found
        constraints = next((given for given in beside if isinstance(given, Mapping)), constraints)
        plan = next((given.plan for given in beside if not isinstance(given, Mapping)), None)
    tables = []
    seen: set[int] = set()
    for path, configs in _collections(found):
        for config in configs:
            if id(config) not in seen:
                seen.add(id(config))
                tables.append(_listed(config, path, constraints.get(config.name), source, batch))
    if not tables:
        raise ConfigError(f"{source}: no tables in a {type(found).__name__}", remedy=_REMEDY)
    unknown = sorted(set(constraints) - {table.name for table in tables})
    if unknown:
        raise ConfigError(f"{source}: constraints of no table: {', '.join(unknown)}", remedy="name the model's tables")
    return tables if plan is None else [_planned(table, plan, source) for table in tables]


def _beside_a_model(given: Any) -> bool:
    return isinstance(given, Mapping) or isinstance(getattr(given, "plan", None), Mapping)


def _planned(table: ListedTable, plan: Mapping[str, Any], source: str) -> ListedTable:
    """Return the table with its sharding and ranks in a ``ShardingPlan``: module path -> table -> ParameterSharding."""
    found = (plan.get(table.module) or {}).get(table.name)
    if found is None:
        raise ConfigError(
            f"{source}: no sharding of table {table.name!r} of module {table.module!r} in the plan",
            remedy="give the plan of this model, with the modules' paths in it",
        )
    ranks = tuple(int(rank) for rank in found.ranks or (0,))
    return replace(table, sharding=str(found.sharding_type), ranks=ranks)


def _collections(found: Any) -> Iterable[tuple[str, list[Any]]]:
    if isinstance(found, list | tuple):
        if all(hasattr(config, "num_embeddings") for config in found):
            yield "", list(found)
        return
    if not hasattr(found, "named_modules"):
        return
    for path, module in found.named_modules():
        for method in ("embedding_bag_configs", "embedding_configs"):
            if callable(getattr(module, method, None)):
                yield path, list(getattr(module, method)())


def _listed(config: Any, path: str, constraint: Any, source: str, batch: int) -> ListedTable:
    kind = getattr(config.data_type, "name", str(config.data_type))
    if kind not in DTYPES:
        raise ConfigError(f"{source}: table {config.name!r}: data type {kind}", remedy=f"one of {', '.join(DTYPES)}")
    features = len(config.feature_names) or 1
    lengths = list(getattr(constraint, "pooling_factors", None) or [1.0])
    poolings = list(getattr(constraint, "num_poolings", None) or [1.0])
    batches = list(getattr(constraint, "batch_sizes", None) or [batch])
    # One figure stands for all features of a table, as in TorchRec's estimator.
    lengths, poolings = (values * features if len(values) == 1 else values for values in (lengths, poolings))
    if len(lengths) != features or len(poolings) != features:
        raise ConfigError(
            f"{source}: table {config.name!r} has {features} features, its constraints {len(lengths)} pooling factors "
            f"and {len(poolings)} num_poolings",
            remedy="give one for each feature",
        )
    bags = sum(poolings) if hasattr(config, "pooling") else 0.0
    lookups = sum(length * count for length, count in zip(lengths, poolings, strict=True))
    return ListedTable(
        config.name, config.num_embeddings, config.embedding_dim, lookups, bags, int(batches[0]),
        module=path, dtype=DTYPES[kind],
    )  # fmt: skip
