"""``demo``: daemon, stream and training on one machine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from flexd.cli.exit_codes import ExitCode
from flexd.cli.options import OutputOption
from flexd.cli.render import OutputFormat, present
from flexd.cli.simulate_command import LengthsOption, SamplesOption
from flexd.core.errors import ConfigError
from flexd.demo.setup import BATCHES, LEAST_BATCH_SIZE, DemoOptions, EmulatedCluster


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
    nodes: Annotated[int, typer.Option("--nodes", help="Emulated nodes.", min=1, max=16)] = EmulatedCluster.nodes,
    local_ranks: Annotated[
        int, typer.Option("--local-ranks", help="Ranks in each node.", min=1, max=16)
    ] = EmulatedCluster.local_ranks,
    link_mbit: Annotated[
        float,
        typer.Option(
            "--link-mbit",
            help="Emulated link of each node and direction, Mbit/s; 0: none, and no step times of peers.",
            min=0,
            max=1e6,
        ),
    ] = EmulatedCluster.link_mbit,
    steps: Annotated[int, typer.Option("--steps", help="Training steps.", min=20, max=1_000_000)] = 300,
    micro_batches: Annotated[
        int, typer.Option("--micro-batches", help="Forward and backward passes of each step.", min=1, max=64)
    ] = BATCHES.micro_batches,
    kafka: Annotated[
        str | None,
        typer.Option("--kafka", metavar="BOOTSTRAP", help="Stream over this broker (host:port) instead of a file log."),
    ] = None,
    tap: Annotated[
        bool,
        typer.Option("--tap", help="Use no log: ranks count their accesses and send the counts."),
    ] = False,
    replica_budget: Annotated[
        float, typer.Option("--replica-budget", help="Replica slots of a rank, as a share of all rows.", min=0, max=1)
    ] = DemoOptions.replica_budget,
    dtype: Annotated[Literal["float64", "float32"], typer.Option("--dtype", help="Type of the rows.")] = "float64",
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            help="Samples of each rank in a step. [default: 512, or what the trace has]",
            min=LEAST_BATCH_SIZE,
            max=65_536,
        ),
    ] = None,
    samples: SamplesOption = BATCHES.kind,
    lengths: LengthsOption = BATCHES.lengths,
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
    if tap and kafka is not None:
        raise ConfigError("--tap with --kafka", remedy="ranks that count need no broker: give one of them")
    batches = replace(
        BATCHES, batch_size=batch_size, steps=steps, kind=samples, lengths=lengths, micro_batches=micro_batches
    )
    cluster = EmulatedCluster(nodes, local_ranks, link_mbit)
    options = DemoOptions(trace, cluster, batches, kafka, tap, replica_budget, dtype, seed, out)
    from flexd.demo.runner import run_demo

    summary, broken = run_demo(options)
    present(summary, output)
    for text in broken:
        print(f"flexd demo: {text}", file=sys.stderr)
    raise typer.Exit(ExitCode.FAILED if broken else ExitCode.OK)
