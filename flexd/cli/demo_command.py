"""``demo``: daemon, stream and training on one machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flexd.cli.options import OutputOption
from flexd.cli.replay_options import LengthsOption, SamplesOption
from flexd.cli.view import OutputFormat
from flexd.demo.options import DemoOptions


class DType(StrEnum):
    FLOAT32 = "float32"
    FLOAT64 = "float64"


def demo(
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE.npz",
            exists=True,
            dir_okay=False,
            help="Accesses to train on; default: drifting Zipf.",
        ),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", help="Emulated nodes.")] = DemoOptions.nodes,
    local_ranks: Annotated[int, typer.Option("--local-ranks", help="Ranks in each node.")] = DemoOptions.local_ranks,
    link_mbit: Annotated[
        float,
        typer.Option(
            "--link-mbit", help="Emulated link of each node and direction, Mbit/s; 0: none, and no step times of peers."
        ),
    ] = DemoOptions.link_mbit,
    steps: Annotated[int, typer.Option("--steps", help="Training steps.")] = DemoOptions.steps,
    micro_batches: Annotated[
        int, typer.Option("--micro-batches", help="Forward and backward passes of each step.")
    ] = DemoOptions.micro_batches,
    kafka: Annotated[
        str | None,
        typer.Option("--kafka", metavar="BOOTSTRAP", help="Stream over this broker (host:port) instead of a file log."),
    ] = None,
    tap: Annotated[
        bool,
        typer.Option("--tap", help="Use no log: ranks count their accesses and send the counts."),
    ] = False,
    replica_budget: Annotated[
        float, typer.Option("--replica-budget", help="Replica slots of a rank, as a share of all rows.")
    ] = DemoOptions.replica_budget,
    dtype: Annotated[DType, typer.Option("--dtype", help="Type of the rows.")] = DType(DemoOptions.dtype),
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", help="Samples of each rank in a step. [default: 512, or what the trace has]"),
    ] = None,
    samples: SamplesOption = DemoOptions.samples,
    lengths: LengthsOption = DemoOptions.lengths,
    seed: Annotated[int, typer.Option("--seed", help="Seed of data and initial rows.")] = DemoOptions.seed,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Keep logs, stream and snapshots in this folder.")
    ] = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Train a small model with a daemon beside it.

    Daemon, stream and training ranks are real processes; the model predicts the next
    item. Prints the step time of several exchanges over an emulated link, and inter-node bytes.

    Example: flexd demo --steps 200
    """
    options = DemoOptions(
        trace=trace,
        nodes=nodes,
        local_ranks=local_ranks,
        link_mbit=link_mbit,
        steps=steps,
        micro_batches=micro_batches,
        kafka=kafka,
        tap=tap,
        replica_budget=replica_budget,
        output=output.value,
        dtype=dtype.value,
        batch_size=batch_size,
        samples=samples,
        lengths=lengths,
        seed=seed,
        out_dir=out,
    )
    from flexd.demo.runner import run_demo

    raise typer.Exit(run_demo(options))
