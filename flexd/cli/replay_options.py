"""Options that commands which replay accesses have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flexd.stream.sample_kinds import SampleKind, SampleLengths

DEFAULT_PRESET = "azure-a100-200g"
# As in flexd.core.keyspace, which imports numpy: a client command does not wait for it.
RowDType = Literal["float64", "float32", "float16", "bfloat16"]
RowOptimizer = Literal["sgd", "rowwise_adagrad", "adagrad", "adam", "rowwise_adam"]


SamplesOption = Annotated[
    SampleKind,
    typer.Option(
        "--samples",
        help="How a trace becomes samples: pieces of histories that do not overlap, at most one of a user in a step "
        "(sequences), or a sample for every event, given to the ranks in turn (impressions).",
    ),
]
LengthsOption = Annotated[
    SampleLengths,
    typer.Option(
        "--lengths",
        help="Only samples with a full history (fixed), or samples as long as the histories of their users (real).",
    ),
]
NodesOption = Annotated[int, typer.Option("--nodes", help="Nodes.", min=1, max=4096)]
LocalRanksOption = Annotated[int, typer.Option("--local-ranks", help="Ranks in each node.", min=1, max=64)]
PresetOption = Annotated[
    str | None, typer.Option("--preset", help=f"Cluster that prices the exchange. [default: {DEFAULT_PRESET}]")
]
TopologyOption = Annotated[
    Path | None,
    typer.Option("--topology", metavar="FILE.yaml", help="Topology file that prices the exchange, from flexd probe."),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch", help="Samples of each rank in a step, or micro-batch. [default: 512, or what the trace has]", min=1
    ),
]
MicroBatchesOption = Annotated[
    int, typer.Option("--micro-batches", help="Forward and backward passes of each step.", min=1, max=4096)
]
DimOption = Annotated[int, typer.Option("--dim", help="Numbers in a row.", min=1, max=65_536)]
DTypeOption = Annotated[RowDType, typer.Option("--dtype", help="Type of the rows.")]
OptimizerOption = Annotated[
    RowOptimizer, typer.Option("--optimizer", help="Optimizer, whose state migrates with a row and is in each copy.")
]
ReplicaFractionOption = Annotated[
    float, typer.Option("--replica-fraction", help="Replica slots of a rank, as a share of all rows.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of random numbers.", min=0)]
