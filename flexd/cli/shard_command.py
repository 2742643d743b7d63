"""``shard``: a TorchRec sharding plan by flexd's planner."""

from __future__ import annotations

import json
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexd.cli.blocks import Block, Facts, Table
from flexd.cli.options import OutputOption, check_file
from flexd.cli.replay_options import (
    DTypeOption,
    LocalRanksOption,
    NodesOption,
    OptimizerOption,
    PresetOption,
    RowDType,
    RowOptimizer,
    TopologyOption,
)
from flexd.cli.simulate_command import make_cluster
from flexd.cli.view import OutputFormat, emit
from flexd.core import units

if TYPE_CHECKING:
    from flexd.planner.tables.sharding import Sharding


class ShardingKind(StrEnum):
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
    plan: Annotated[Path, typer.Option("--plan", metavar="FILE.json", help="Where the plan is written.")] = Path(
        "sharding.json"
    ),
    nodes: NodesOption = 2,
    local_ranks: LocalRanksOption = 2,
    preset: PresetOption = None,
    topology: TopologyOption = None,
    memory_gb: MemoryOption = 40.0,
    zipf: Annotated[
        float, typer.Option("--zipf", help="Exponent of tables that the profile does not have.", min=0, max=4)
    ] = 1.05,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="FILE.npz",
            exists=True,
            dir_okay=False,
            help="Measured accesses, from simulate --save-profile.",
        ),
    ] = None,
    without: Annotated[
        list[ShardingKind] | None, typer.Option("--without", help="A sharding that no table may get; repeatable.")
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", help="Samples of a rank, of a function's tables without batch_sizes.", min=1)
    ] = 512,
    dtype: DTypeOption = RowDType.FLOAT32,
    optimizer: OptimizerOption = RowOptimizer.ROWWISE_ADAGRAD,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Choose TorchRec's sharding of every table, for those who stay with TorchRec.

    Needs no daemon and no GPU. Load the plan by flexd.torchrec.sharding_plan(model, FILE).

    Example: flexd shard tables.csv --nodes 2 --local-ranks 8 --plan sharding.json
    """
    check_file("--plan", plan)
    from flexd.cli.model_tables import tables_of_source
    from flexd.core.layout import RankLayout
    from flexd.planner.tables.sharding import TableStatistics, listed_seconds, shard_tables
    from flexd.sketch.profile_file import read_profile

    statistics = TableStatistics(zipf, None if profile is None else read_profile(profile), dtype.value, optimizer.value)
    listed, layout = tables_of_source(tables, batch), RankLayout(nodes, local_ranks)
    cluster = make_cluster(preset, topology, 1.0)
    listed_ranks = 1 + max((max(table.ranks, default=-1) for table in listed), default=-1)
    # A list may come from another job: its plan is then no reason to make none.
    before = None if listed_ranks > layout.world_size else listed_seconds(listed, layout, cluster, statistics)
    found = shard_tables(
        listed, layout, cluster, memory_gb * 1e9, statistics, without=[kind.value for kind in without or ()]
    )
    document = found.document()
    document["predicted"]["listed_step_seconds"] = before
    plan.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    emit(document | {"plan": str(plan)}, sharding_blocks(found, plan, before, listed_ranks), output)


def sharding_blocks(found: Sharding, plan: Path, before: float | None, listed_ranks: int) -> list[Block]:
    """Return the predicted step and the sharding of every table.

    Args:
        before: seconds of a step by the plan that the list has; None if it is not priced.
        listed_ranks: ranks that the plan of the list needs; 0 if it has none.
    """
    placement = found.placement
    listed = "none" if before is None else f"{units.seconds(before)} a step by the same prices"
    if listed_ranks > placement.layout.world_size:
        listed = f"not priced: it is for {listed_ranks} ranks or more"
    counts = Counter(kind for kind, _ in found.chosen)
    facts = Facts(
        "",
        (
            ("plan", str(plan)),
            ("tables", f"{len(found.tables)}: " + ", ".join(f"{n} {kind}" for kind, n in counts.most_common())),
            (
                "busiest rank",
                f"{units.seconds(placement.seconds)} a step of embeddings, all row-wise "
                f"{units.seconds(placement.spread_seconds)}, no plan under {units.seconds(placement.bound_seconds)}",
            ),
            ("plan of the list", listed),
            ("balance", f"{placement.balance:.2f} (least over most of the ranks' seconds)"),
            ("memory", f"{units.size(float(placement.memory_bytes.max()))} on the fullest rank"),
        ),
    )
    columns = ("table", "rows", "dim", "sharding", "ranks")
    rows = tuple(
        (table.name, units.count(table.rows), str(table.dim), kind, _ranks(ranks))
        for table, (kind, ranks) in zip(found.tables, found.chosen, strict=True)
    )
    return [facts, Table("sharding", columns, rows, frozenset(columns[1:3]), ("dim", "rows"))]


def _ranks(ranks: list[int]) -> str:
    whole = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if whole else ",".join(str(rank) for rank in ranks)
