"""``shard``: the sharding of every table by flexd's planner, for TorchRec or for flexd's trainer."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flexd.cli.blocks import Block, Facts, Table
from flexd.cli.options import OutputOption, check_file
from flexd.cli.render import OutputFormat, emit
from flexd.cli.simulate_command import (
    DTypeOption,
    LocalRanksOption,
    NodesOption,
    OptimizerOption,
    PresetOption,
    TopologyOption,
    make_cluster,
)
from flexd.core import units
from flexd.core.sharding_types import DATA_PARALLEL

if TYPE_CHECKING:
    from flexd.planner.tables.solve import TablePlacement
    from flexd.planner.tables.table_list import ListedTable
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


MemoryOption = Annotated[
    float,
    typer.Option("--memory-gb", metavar="GB", min=1e-6, help="10^9 bytes of a rank for rows, states and gradients."),
]


def shard(
    tables: Annotated[
        str,
        typer.Argument(metavar="TABLES", help="Table list (.csv, .json), or a Python function, module:function."),
    ],
    trainer: Annotated[
        Literal["torchrec", "flexd"],
        typer.Option("--for", help="Who trains with it: TorchRec, or flexd by sharding types and pooling places."),
    ] = "torchrec",
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE.json",
            help="Where it is written. [default: sharding.json, with --for flexd rules.json]",
        ),
    ] = None,
    nodes: NodesOption = 2,
    local_ranks: LocalRanksOption = 2,
    preset: PresetOption = None,
    topology: TopologyOption = None,
    memory_gb: MemoryOption = 40.0,
    zipf: Annotated[
        float, typer.Option("--zipf", help="Exponent of tables that the trace does not have.", min=0, max=4)
    ] = 1.05,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE.npz", exists=True, dir_okay=False, help="Measured accesses (docs/demo.md)."
        ),
    ] = None,
    without: Annotated[
        list[LeftOutKind] | None,
        typer.Option("--without", help="A sharding type that no table may get; repeatable."),
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", help="Samples of a rank, of a function's tables without batch_sizes.", min=1)
    ] = 512,
    dtype: DTypeOption = "float32",
    optimizer: OptimizerOption = "rowwise_adagrad",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Choose the sharding of every table, for TorchRec or for flexd's trainer.

    Needs no daemon and no GPU. Load the plan by flexd.torchrec.sharding_plan(model, FILE), or sharding types and
    pooling places by EmbeddingBagCollection(tables, rules=FILE).

    Example: flexd shard tables.csv --nodes 2 --local-ranks 8 --plan sharding.json
    """
    file = plan or Path("rules.json" if trainer == "flexd" else "sharding.json")
    check_file("--plan", file)
    from flexd.cli.model_tables import tables_of_source
    from flexd.core.layout import RankLayout
    from flexd.planner.tables.sharding import (
        TableStatistics,
        listed_seconds,
        plan_rules,
        rules_document,
        shard_tables,
        sharding_document,
    )

    statistics = TableStatistics(zipf, None if trace is None else _counted(trace), dtype, optimizer)
    listed, layout = tables_of_source(tables, batch), RankLayout(nodes, local_ranks)
    cluster = make_cluster(preset, topology, 1.0)
    left_out = [kind.value for kind in without or ()]
    if trainer == "flexd":
        rules = plan_rules(listed, layout, cluster, memory_gb * 1e9, statistics, without=left_out)
        _write(rules_document(listed, rules), file, rule_blocks(listed, rules, file, cluster), output)
        return
    listed_ranks = 1 + max((max(table.ranks, default=-1) for table in listed), default=-1)
    # A list may come from another job: its plan is then no reason to make none.
    before = None if listed_ranks > layout.world_size else listed_seconds(listed, layout, cluster, statistics)
    found = shard_tables(listed, layout, cluster, memory_gb * 1e9, statistics, without=left_out)
    document = sharding_document(listed, found)
    document["predicted"]["listed_step_seconds"] = before
    _write(document, file, sharding_blocks(listed, found, file, before, listed_ranks), output)


def _counted(trace: Path) -> Profile:
    """Return the exact shares of the rows in a trace; look-ups of a step are those of the table list."""
    from flexd.core.keyspace import KeySpace, TableSpec
    from flexd.simulate.step_keys import exact_profile
    from flexd.stream.trace import load_trace

    events = load_trace(trace)
    named = zip(events.table_names, events.table_rows.tolist(), strict=True)
    keyspace = KeySpace([TableSpec(name, rows, 1) for name, rows in named])
    counted = exact_profile([[keyspace.first_key[events.table] + events.row]], keyspace)
    return replace(counted, tables=tuple(replace(table, accesses_per_step=0.0) for table in counted.tables))


def _write(document: dict[str, Any], file: Path, blocks: list[Block], output: OutputFormat) -> None:
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    emit(document | {"plan": str(file)}, blocks, output)


def sharding_blocks(
    tables: list[ListedTable], placement: TablePlacement, plan: Path, before: float | None, listed_ranks: int
) -> list[Block]:
    """Return the predicted step and the sharding of every table.

    Args:
        before: seconds of a step by the plan that the list has; None if it is not priced.
        listed_ranks: ranks that the plan of the list needs; 0 if it has none.
    """
    from flexd.planner.tables.sharding import torchrec_sharding

    chosen = torchrec_sharding(placement)
    listed = "none" if before is None else f"{units.seconds(before)} a step by the same prices"
    if listed_ranks > placement.layout.world_size:
        listed = f"not priced: it is for {listed_ranks} ranks or more"
    counts = Counter(kind for kind, _ in chosen)
    facts = _facts(plan, placement, counts, "all row-wise", ("plan of the list", listed))
    columns = ("table", "rows", "dim", "sharding", "ranks")
    rows = tuple(
        (table.name, units.count(table.rows), str(table.dim), kind, _ranks(ranks))
        for table, (kind, ranks) in zip(tables, chosen, strict=True)
    )
    return [facts, Table("sharding", columns, rows, frozenset(columns[1:3]), ("dim", "rows"))]


def rule_blocks(tables: list[ListedTable], placement: TablePlacement, plan: Path, cluster: Cluster) -> list[Block]:
    """Return the predicted step, and sharding type and pooling place of every table."""
    from flexd.planner.tables.sharding import flexd_sharding

    chosen = flexd_sharding(tables, placement)
    counts = Counter(
        rule
        if rule == DATA_PARALLEL
        else f"{rule.partition(':')[0]}, {f'pooled at the {pooling_at}' if pooling_at else 'un-pooled'}"
        for rule, pooling_at in chosen
    )
    columns = ("table", "rows", "dim", "sharding", "pooled at")
    rows = tuple(
        (table.name, units.count(table.rows), str(table.dim), rule, pooling_at or "un-pooled")
        for table, (rule, pooling_at) in zip(tables, chosen, strict=True)
    )
    return [
        _facts(
            plan,
            placement,
            counts,
            "all row_wise, pooled at the requester",
            ("a step beside its links", step_cost_words(cluster)),
        ),
        Table("sharding types", columns, rows, frozenset(columns[1:3]), ("dim", "rows")),
    ]


def _facts(plan: Path, placement: TablePlacement, counts: Counter[str], compared: str, *more: tuple[str, str]) -> Facts:
    """``compared``: the placement of ``spread_seconds``, in words."""
    bound = f", no plan under {units.seconds(placement.bound_seconds)}" if placement.bound_seconds > 0 else ""
    return Facts(
        "",
        (
            ("plan", str(plan)),
            ("tables", f"{counts.total()}: " + "; ".join(f"{n} {kind}" for kind, n in counts.most_common())),
            (
                "busiest rank",
                f"{units.seconds(placement.seconds)} a step of embeddings, {compared} "
                f"{units.seconds(placement.spread_seconds)}{bound}",
            ),
            *more,
            ("balance", f"{placement.balance:.2f} (least over most of the ranks' seconds)"),
            ("memory", f"{units.size(float(placement.memory_bytes.max()))} on the fullest rank"),
        ),
    )


def _ranks(ranks: list[int]) -> str:
    whole = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if whole else ",".join(str(rank) for rank in ranks)
