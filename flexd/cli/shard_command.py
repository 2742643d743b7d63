"""``shard``: the sharding of every table by flexd's planner, for TorchRec or for flexd's trainer."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flexd.cli.options import OutputOption, check_file
from flexd.cli.render import OutputFormat, blocks_of, emit
from flexd.cli.replay_commands import ClusterOptions, DTypeOption, OptimizerOption
from flexd.core import units
from flexd.core.errors import ConfigError
from flexd.core.model import Model, Show

if TYPE_CHECKING:
    from flexd.planner.tables.sharding import ListedTable
    from flexd.sketch.profile import Profile
    from flexd.topology.cluster import Cluster


def step_cost_words(cluster: Cluster) -> str:
    costs = cluster.step_costs
    if costs is None:
        return "not measured: latencies and an assumed memory bandwidth; flexd probe measures it"
    return (
        f"{units.seconds(costs.sums_seconds)} with tables pooled at the owner, "
        f"{units.seconds(costs.copies_seconds)} with copies on every rank, "
        f"rows at {units.size(costs.row_bytes_per_second)}/s"
    )


class LeftOutKind(StrEnum):
    """TorchRec's names; row-wise is always allowed."""

    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    TABLE_ROW_WISE = "table_row_wise"
    DATA_PARALLEL = "data_parallel"


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """Options of ``flexd shard``."""

    tables: Annotated[
        str,
        typer.Argument(metavar="TABLES", help="Table list (.csv, .json), or a Python function, module:function."),
    ]
    trainer: Annotated[
        Literal["torchrec", "flexd"],
        typer.Option("--for", help="Who trains with it: TorchRec, or flexd by sharding types and pooling places."),
    ] = "torchrec"
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE.json",
            help="Where it is written. [default: sharding.json, with --for flexd rules.json]",
        ),
    ] = None
    cluster: ClusterOptions
    memory_gb: Annotated[
        float,
        typer.Option(
            "--memory-gb", metavar="GB", min=1e-6, help="10^9 bytes of a rank for rows, states and gradients."
        ),
    ] = 40.0
    zipf: Annotated[
        float, typer.Option("--zipf", help="Exponent of tables that the trace does not have.", min=0, max=4)
    ] = 1.05
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE.npz", exists=True, dir_okay=False, help="Measured accesses (docs/demo.md)."
        ),
    ] = None
    without: Annotated[
        list[LeftOutKind] | None,
        typer.Option("--without", help="A sharding type that no table may get; repeatable."),
    ] = None
    batch: Annotated[
        int, typer.Option("--batch", help="Samples of a rank, of a function's tables without batch_sizes.", min=1)
    ] = 512
    dtype: DTypeOption = "float32"
    optimizer: OptimizerOption = "rowwise_adagrad"
    output: OutputOption = OutputFormat.TABLE


def shard(given: ShardOptions) -> None:
    """Choose the sharding of every table, for TorchRec or for flexd's trainer.

    Needs no daemon and no GPU. Load the plan by flexd.torchrec.sharding_plan(model, FILE), or sharding types and
    pooling places by EmbeddingBagCollection(tables, rules=FILE).

    Example: flexd shard tables.csv --nodes 2 --local-ranks 8 --plan sharding.json
    """
    file = given.plan or Path("rules.json" if given.trainer == "flexd" else "sharding.json")
    check_file("--plan", file)
    from flexd.planner.tables.sharding import (
        TableStatistics,
        listed_seconds,
        plan_rules,
        rules_document,
        shard_tables,
        sharding_document,
        torchrec_sharding,
    )

    profile = None if given.trace is None else _counted(given.trace)
    statistics = TableStatistics(given.zipf, profile, given.dtype, given.optimizer)
    listed, layout = tables_of_source(given.tables, given.batch), given.cluster.layout()
    cluster, memory_bytes = given.cluster.load(), given.memory_gb * 1e9
    left_out = [kind.value for kind in given.without or ()]
    if given.trainer == "flexd":
        rules = plan_rules(listed, layout, cluster, memory_bytes, statistics, without=left_out)
        document = rules_document(listed, rules)
        shardings = Counter(
            f"{table['sharding'].partition(':')[0]} ({table['pooling_at'] or 'un-pooled'})"
            for table in document["tables"]
        )
        _write(document, file, {"counts": shardings, "step_costs": step_cost_words(cluster)}, given.output)
        return
    listed_ranks = 1 + max((max(table.ranks, default=-1) for table in listed), default=-1)
    # A list may come from another job: its plan is then no reason to make none.
    fits = listed_ranks <= layout.world_size
    before = listed_seconds(listed, layout, cluster, statistics) if fits else None
    found = shard_tables(listed, layout, cluster, memory_bytes, statistics, without=left_out)
    document = sharding_document(listed, found)
    document["predicted"]["listed_step_seconds"] = before
    shardings = Counter(kind for kind, _ in torchrec_sharding(found))
    unpriced = "" if fits else f"not priced: it is for {listed_ranks} ranks or more"
    _write(document, file, {"counts": shardings, "listed_plan": unpriced}, given.output)


def _counted(trace: Path) -> Profile:
    """Return the exact shares of the rows in a trace; look-ups of a step are those of the table list."""
    from flexd.core.keyspace import KeySpace, TableSpec
    from flexd.simulate.accesses import exact_profile
    from flexd.stream.trace import load_trace

    events = load_trace(trace)
    named = zip(events.table_names, events.table_rows.tolist(), strict=True)
    keyspace = KeySpace([TableSpec(name, rows, 1) for name, rows in named])
    counted = exact_profile([[keyspace.first_key[events.table] + events.row]], keyspace)
    return replace(counted, tables=tuple(replace(table, accesses_per_step=0.0) for table in counted.tables))


class PredictedStep(Model):
    """The busiest rank's step of embeddings.

    Attributes:
        row_wise_step_seconds: with every table row-wise (flexd: pooled at the requester).
        bound_seconds: no plan is under it.
        listed_step_seconds: by the plan of the list.
        balance: least over most of the ranks' seconds.
        memory_bytes: of each rank.
    """

    step_seconds: float
    row_wise_step_seconds: Annotated[float, Show("all row-wise")]
    bound_seconds: Annotated[float, Show("no plan under")]
    listed_step_seconds: Annotated[float | None, Show("plan of the list")] = None
    balance: Annotated[float, Show(unit="{:.2f}".format)]
    memory_bytes: Annotated[tuple[int, ...], Show("memory of each rank")]


class TorchRecSharding(Model):
    sharding_type: Annotated[str, Show("sharding")]
    ranks: tuple[int, ...]


class TableRule(Model):
    name: str
    rows: int
    dim: int
    sharding: str
    pooling_at: str | None


class ShardingReport(Model):
    """A plan of tables, as text shows it.

    Attributes:
        counts: tables by sharding type.
        listed_plan, step_costs: in words, where the plan says nothing of them.
    """

    plan: str
    counts: Annotated[dict[str, int], Show("tables")]
    listed_plan: Annotated[str, Show("plan of the list")] = ""
    step_costs: Annotated[str, Show("a step beside its links")] = ""
    predicted: PredictedStep
    modules: Annotated[dict[str, dict[str, TorchRecSharding]], Show("sharding")] = {}  # noqa: RUF012
    tables: Annotated[tuple[TableRule, ...], Show("sharding types")] = ()


def _write(document: dict[str, Any], file: Path, more: dict[str, Any], output: OutputFormat) -> None:
    """``more``: what text says beside the document."""
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    answer = document | {"plan": str(file)}
    emit(answer, blocks_of(ShardingReport.model_validate(answer | more), tables=True), output)


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
        from flexd.planner.tables.sharding import read_tables

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
    first: dict[int, tuple[Any, str]] = {}
    for path, configs in _collections(found):
        for config in configs:
            first.setdefault(id(config), (config, path))
    tables = [_listed(each, path, constraints.get(each.name), source, batch) for each, path in first.values()]
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
    from flexd.planner.tables.sharding import ListedTable

    return ListedTable(
        config.name, config.num_embeddings, config.embedding_dim, lookups, bags, int(batches[0]),
        module=path, dtype=DTYPES[kind],
    )  # fmt: skip
