"""Convert TorchRec's table configurations and their optimizers to flexd's, and set the initial values of tables."""

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torchrec.optim
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType
from torchrec.types import DataType

from flexd.core.errors import EmbeddingError
from flexd.embedding.bag_collection import EmbeddingBagTable
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.row_optimizers import SGD, Adagrad, Adam, RowOptimizer, RowWiseAdagrad, RowWiseAdam

DTYPES = {DataType.FP32: "float32", DataType.FP16: "float16", DataType.BF16: "bfloat16"}
POOLINGS = {PoolingType.SUM: "sum", PoolingType.MEAN: "mean"}
ELEMENTWISE = (
    nn.init.uniform_,
    nn.init.normal_,
    nn.init.trunc_normal_,
    nn.init.constant_,
    nn.init.zeros_,
    nn.init.ones_,
)
"""Initialisers that treat a block of rows like the whole table."""
BLOCK_ROWS = 65_536
MAX_WHOLE_TABLE_BYTES = 2**30
"""Limit of a table with another ``init_fn``, which may depend on all rows: every rank makes the whole table."""
_UNSUPPORTED = {
    "num_embeddings_post_pruning": None,
    "need_pos": False,
    "input_dim": None,
    "total_num_buckets": None,
    "use_virtual_table": False,
    "virtual_table_eviction_policy": None,
    "enable_embedding_update": False,
    "stash_weights": False,
}


def features_of(config: BaseEmbeddingConfig) -> list[str]:
    """Return the names of the inputs that read the table; default: the name of the table, as in TorchRec."""
    return list(config.feature_names) or [config.name]


def embedding_names(configs: Sequence[BaseEmbeddingConfig]) -> list[list[str]]:
    """Return the output names of each table: the feature's, or "feature@table" if several tables read the feature."""
    every = [feature for config in configs for feature in features_of(config)]
    return [
        [f"{feature}@{config.name}" if every.count(feature) > 1 else feature for feature in features_of(config)]
        for config in configs
    ]


def tables_of(configs: Sequence[BaseEmbeddingConfig], *, runs_init_fn: bool = True) -> list[EmbeddingTable]:
    """Return one table for each configuration. Its features are TorchRec's *embedding names*, so each has one table.

    Args:
        runs_init_fn: ``initialise`` will make the initial values; False if they are loaded.

    Raises:
        EmbeddingError: a data type, pooling or other property is not supported; none is ignored.
    """
    tables: list[EmbeddingTable] = []
    for config, names in zip(configs, embedding_names(configs), strict=True):
        where = f"table {config.name!r}"
        for name, usual in _UNSUPPORTED.items():
            if getattr(config, name, usual) != usual:
                raise EmbeddingError(f"{where}: {name}={getattr(config, name)!r}", remedy="not supported: leave it out")
        if config.data_type not in DTYPES:
            raise EmbeddingError(
                f"{where}: data_type {config.data_type}", remedy=f"one of {', '.join(kind.name for kind in DTYPES)}"
            )
        bound = _uniform_bound(config.init_fn)
        arguments: dict[str, Any] = {
            "name": config.name, "rows": config.num_embeddings, "dim": config.embedding_dim, "features": tuple(names),
            "dtype": DTYPES[config.data_type], "init_scale": bound if bound is not None else 0.0,
        }  # fmt: skip
        if not isinstance(config, EmbeddingBagConfig):
            tables.append(EmbeddingTable(**arguments))
        elif config.pooling in POOLINGS:
            tables.append(EmbeddingBagTable(**arguments, pooling=POOLINGS[config.pooling]))
        else:
            raise EmbeddingError(f"{where}: pooling {config.pooling}", remedy="SUM or MEAN")
        if bound is None and runs_init_fn:
            _check_size(config, DTYPES[config.data_type])
    return tables


def initialise(
    collection: EmbeddingCollection,
    configs: Sequence[BaseEmbeddingConfig],
    seed: int,
    *,
    skipped: Collection[str] = (),
) -> None:
    """Local. Run each ``init_fn`` other than a symmetric uniform one, seeded by seed, table and block.

    So the same seed gives the same tables on any number of ranks.

    Args:
        skipped: names of tables that keep their values.
    """
    for config, table in zip(configs, collection.tables, strict=True):
        if table.name in skipped or _uniform_bound(config.init_fn) is not None:
            continue
        rows = BLOCK_ROWS if _is_elementwise(config.init_fn) else table.rows
        for first in range(0, table.rows, rows):
            block = torch.empty((min(rows, table.rows - first), table.dim), dtype=collection.dtype_of(table.name))
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(zlib.crc32(f"{seed} {table.name} {first}".encode()))
                config.init_fn(block)
            collection.set_rows(table.name, first, block)


def _check_size(config: BaseEmbeddingConfig, dtype: str) -> None:
    size = config.num_embeddings * config.embedding_dim * (4 if dtype == "float32" else 2)
    if size > MAX_WHOLE_TABLE_BYTES and not _is_elementwise(config.init_fn):
        raise EmbeddingError(
            f"table {config.name!r}: its init_fn would need all {size:,} bytes of the table on every rank",
            remedy="use weight_init_min and weight_init_max, an initialiser of torch.nn.init that treats numbers one "
            "by one (uniform_, normal_, trunc_normal_, constant_), or load_rows after construction",
        )


def _unwrapped(function: Callable[..., Any] | None) -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
    if isinstance(function, partial):
        return function.func, dict(function.keywords), function.args
    return function, {}, ()


def _is_elementwise(function: Callable[..., Any] | None) -> bool:
    return _unwrapped(function)[0] in ELEMENTWISE


def _uniform_bound(function: Callable[..., Any] | None) -> float | None:
    """Return b of a uniform distribution in [-b, b), which flexd draws row by row for any number of ranks, or None."""
    if function is None:
        return None
    inner, given, positional = _unwrapped(function)
    if inner is nn.init.uniform_ and not positional and set(given) == {"a", "b"} and given["a"] == -given["b"]:
        return float(given["b"])
    return None


# Settings of each optimizer with the defaults of FBGEMM's fused ones, which ``DistributedModelParallel`` trains with
# where a setting was not given; torch's own defaults differ.
_SETTINGS: dict[Callable[..., RowOptimizer], dict[str, Any]] = {
    SGD: {"lr": 0.01},
    Adagrad: {"lr": 0.01, "eps": 1e-8},
    RowWiseAdagrad: {"lr": 0.01, "eps": 1e-8},
    Adam: {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8},
    RowWiseAdam: {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8},
}
_RULES: dict[type[torch.optim.Optimizer], Callable[..., RowOptimizer]] = {
    torch.optim.SGD: SGD,
    torchrec.optim.SGD: SGD,
    torch.optim.Adagrad: Adagrad,
    torchrec.optim.Adagrad: Adagrad,
    torchrec.optim.RowWiseAdagrad: RowWiseAdagrad,
    torch.optim.Adam: Adam,
    torchrec.optim.Adam: Adam,
    torchrec.optim.PartialRowWiseAdam: RowWiseAdam,
}
# Values with which a setting that has no counterpart does nothing.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "momentum": (0,),
    "dampening": (0,),
    "nesterov": (False,),
    "weight_decay": (0,),
    "lr_decay": (0,),
    "initial_accumulator_value": (0,),
    "amsgrad": (False,),
    "maximize": (False,),
    "foreach": (None, False, True),
    "fused": (None, False, True),
    "differentiable": (False,),
    "capturable": (False,),
}
_OTHER_NAMES = {"learning_rate": "lr"}


def attached_optimizers(weights: Mapping[str, nn.Parameter]) -> dict[str, RowOptimizer]:
    """Return the optimizer of each table; without one ``SGD(0.01)``, as ``DistributedModelParallel`` has it.

    Args:
        weights: of each table, by its name in the model.

    Raises:
        EmbeddingError: a table has an optimizer that flexd does not have with the same result, or two tables have one
            kind with settings that differ in more than the learning rate; the error names them.
    """
    found = {name: _attached(name, weight) or SGD(_SETTINGS[SGD]["lr"]) for name, weight in weights.items()}
    kinds: dict[str, tuple[str, RowOptimizer]] = {}
    for name, rule in found.items():
        first, expected = kinds.setdefault(rule.name, (name, rule))
        if replace(rule, lr=expected.lr) != expected:
            raise EmbeddingError(
                f"tables {first!r} and {name!r} have different settings: {expected} and {rule}",
                remedy="tables with one kind of optimizer may differ in lr alone: pass optimizer= for all",
            )
    return found


def _attached(name: str, weight: nn.Parameter) -> RowOptimizer | None:
    classes: list[type[torch.optim.Optimizer]] = getattr(weight, "_optimizer_classes", [])
    settings: list[dict[str, Any]] = getattr(weight, "_optimizer_kwargs", [])
    if not classes:
        return None
    if len(classes) > 1:
        raise EmbeddingError(
            f"table {name!r} has {len(classes)} optimizers: {', '.join(kind.__name__ for kind in classes)}",
            remedy="apply one, or pass optimizer=",
        )
    rule = _RULES.get(classes[0])
    if rule is None:
        raise EmbeddingError(
            f"table {name!r}: optimizer {classes[0].__module__}.{classes[0].__name__}",
            remedy=f"one of {', '.join(sorted({kind.__name__ for kind in _RULES}))}, or pass optimizer=",
        )
    return _converted(name, rule, settings[0])


def _converted(name: str, rule: Callable[..., RowOptimizer], given: Mapping[str, Any]) -> RowOptimizer:
    settings = dict(_SETTINGS[rule])
    for key, value in given.items():
        known = _OTHER_NAMES.get(key, key)
        if known in settings:
            settings[known] = value
        elif known in ("beta1", "beta2") and "betas" in settings:
            beta1, beta2 = settings["betas"]
            settings["betas"] = (value, beta2) if known == "beta1" else (beta1, value)
        elif value not in _WITHOUT_EFFECT.get(key, ()):
            raise EmbeddingError(
                f"table {name!r}: its optimizer has {key}={value!r}, which flexd cannot take over",
                remedy="pass optimizer=, for instance flexd.Adam(lr=..., weight_decay=...)",
            )
    return rule(**settings)
