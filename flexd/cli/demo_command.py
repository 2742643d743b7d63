"""``demo``: the whole of flexd on one machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flexd.cli.options import OutputOption
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
    steps: Annotated[int, typer.Option("--steps", help="Training steps.")] = DemoOptions.steps,
    kafka: Annotated[
        str | None,
        typer.Option("--kafka", metavar="BOOTSTRAP", help="Stream over this broker (host:port) instead of a file log."),
    ] = None,
    tap: Annotated[
        bool,
        typer.Option("--tap", help="No log at all: the ranks count their accesses themselves and ship the counts."),
    ] = False,
    replica_budget: Annotated[
        float, typer.Option("--replica-budget", help="Replica slots of a rank, as a share of all rows.")
    ] = DemoOptions.replica_budget,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Draw inter-node bytes a step, with the plans marked."),
    ] = None,
    kill_daemon_at: Annotated[
        int | None, typer.Option("--kill-daemon-at", metavar="STEP", help="SIGKILL the daemon at this step.")
    ] = None,
    restart_daemon_after: Annotated[
        int | None,
        typer.Option("--restart-daemon-after", metavar="STEPS", help="Start it again so many steps after the kill."),
    ] = None,
    dtype: Annotated[DType, typer.Option("--dtype", help="Of the tables.")] = DType(DemoOptions.dtype),
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Samples of each rank in a step.")
    ] = DemoOptions.batch_size,
    seed: Annotated[int, typer.Option("--seed", help="Of data and initial rows.")] = DemoOptions.seed,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Keep logs, stream and snapshots here.")
    ] = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Trains a small next-item model on real processes, with a daemon beside it, and shows what flexd changed.

    Example: flexd demo --steps 200 --plot demo.png
    """
    options = DemoOptions(
        trace=trace,
        nodes=nodes,
        local_ranks=local_ranks,
        steps=steps,
        kafka=kafka,
        tap=tap,
        replica_budget=replica_budget,
        output=output.value,
        plot=plot,
        kill_daemon_at=kill_daemon_at,
        restart_daemon_after=restart_daemon_after,
        dtype=dtype.value,
        batch_size=batch_size,
        seed=seed,
        out_dir=out,
    )
    from flexd.demo.runner import run_demo

    raise typer.Exit(run_demo(options))
