"""``advise``: is flexd worth it for a training, before anything is installed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from flexd.cli.options import OutputOption
from flexd.cli.render import OutputFormat, present
from flexd.cli.simulate_command import DRAWN_BATCH, ClusterOptions, ReplayOptions, show_progress
from flexd.core.errors import ConfigError


@dataclass(frozen=True)
class MeasuredStep:
    """A step of the training today."""

    step_ms: Annotated[
        float, typer.Option("--step-ms", metavar="MS", help="Measured time of a training step today.", min=1e-3)
    ]
    computing_ms: Annotated[
        float | None,
        typer.Option(
            "--computing-ms",
            metavar="MS",
            min=0,
            help="Measured time of the same step with rows that need no exchange; corrects the prices.",
        ),
    ] = None
    row_work_ms: Annotated[
        float,
        typer.Option(
            "--row-work-ms",
            metavar="MS",
            min=0,
            help="Of the computing: look-up, dedup and update of rows, which no prefetch pipeline hides.",
        ),
    ] = 0.0
    now: Annotated[
        Literal["row_wise", "dedup", "two_hops"], typer.Option("--now", help="Exchange of that training.")
    ] = "row_wise"


@dataclass(frozen=True, kw_only=True)
class AdviseOptions:
    """Options of ``flexd advise``."""

    measured: MeasuredStep
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE.npz", exists=True, dir_okay=False, help="Events (docs/demo.md)."),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            "-c",
            "--config",
            metavar="FILE",
            help="Read the stream of this daemon's YAML file; of a tap, what the daemon has counted.",
        ),
    ] = None
    seconds: Annotated[
        float, typer.Option("--for", metavar="SECONDS", help="Longest time to read that stream.", min=1, max=86_400)
    ] = 60.0
    cluster: ClusterOptions
    scale: Annotated[
        float, typer.Option("--scale", help="Batch of the job over --batch, where a trace is too small for it.")
    ] = 1.0
    replay: ReplayOptions
    steps: Annotated[int, typer.Option("--steps", help="Training steps to replay.", min=8, max=1_000_000)] = 80
    price_error: Annotated[
        float, typer.Option("--price-error", help="Relative error of the cluster's prices; widens the ranges.")
    ] = 0.15
    worth: Annotated[float, typer.Option("--worth", help="Share of the step below which nothing is advised.")] = 0.02
    output: OutputOption = OutputFormat.TABLE


def advise(given: AdviseOptions) -> None:
    """Predict what flexd would save: milliseconds per step, GPU-hours per day, and the memory it takes.

    Needs no daemon and no GPU. Give --trace or --config, and your training's step time.

    Example: flexd advise --step-ms 180 --trace events.npz --nodes 8 --local-ranks 8
    """
    if (given.trace is None) == (given.config is None):
        raise ConfigError("no accesses, or two of them", remedy="give --trace or --config")
    from flexd.simulate.accesses import profile_accesses
    from flexd.simulate.advice import NOW, AdviceSettings, affinity_of_samples, affinity_of_trace
    from flexd.simulate.advice import advise as advise_on
    from flexd.simulate.simulation import SimulationSettings

    layout, measured, replay = given.cluster.layout(), given.measured, given.replay
    cluster, sampled = given.cluster.load(given.scale), None
    if given.config is None:
        accesses = replay.of_trace(given.trace, layout, given.steps)
    else:
        from flexd.daemon.config_file import load_with_known_tables
        from flexd.daemon.stream_sample import read_source

        loaded = load_with_known_tables(given.config)
        read = read_source(loaded, given.seconds)
        sampled = read.coaccess
        accesses = profile_accesses(
            loaded.job, read.profile, loaded.keyspace().tables, layout,
            accesses_per_rank=(replay.batch or DRAWN_BATCH) * replay.history, steps=given.steps, seed=replay.seed,
            micro_batches=replay.micro_batches,
        )  # fmt: skip
    settings = AdviceSettings(
        measured.step_ms / 1e3, None if measured.computing_ms is None else measured.computing_ms / 1e3,
        measured.row_work_ms / 1e3, NOW[measured.now], given.scale, given.price_error, given.worth,
    )  # fmt: skip
    simulated = SimulationSettings(replica_fraction=replay.replica_fraction)
    found = advise_on(accesses, layout, cluster, simulated, settings, show_progress(given.steps))
    if sampled is None:
        affinity = affinity_of_trace(accesses, layout)
    else:
        affinity = affinity_of_samples(sampled, accesses.keyspace, layout, found.accesses_per_step)
    present(found.model_copy(update={"affinity": affinity}), given.output)
