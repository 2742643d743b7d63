"""``advise``: is flexd worth it for a training, before anything is installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flexd.cli.options import OutputOption
from flexd.cli.render import OutputFormat, present
from flexd.cli.simulate_command import (
    DRAWN_BATCH,
    BatchOption,
    DimOption,
    DTypeOption,
    LengthsOption,
    LocalRanksOption,
    MicroBatchesOption,
    NodesOption,
    OptimizerOption,
    PresetOption,
    ReplicaFractionOption,
    SamplesOption,
    SeedOption,
    TopologyOption,
    make_cluster,
    make_trace_accesses,
    show_progress,
)
from flexd.core.errors import ConfigError
from flexd.stream.sample_kinds import BatchOptions, SampleKind, SampleLengths

if TYPE_CHECKING:
    from flexd.simulate.accesses import Accesses
    from flexd.sketch.coaccess import CoAccess


def advise(
    step_ms: Annotated[
        float, typer.Option("--step-ms", metavar="MS", help="Measured time of a training step today.", min=1e-3)
    ],
    computing_ms: Annotated[
        float | None,
        typer.Option(
            "--computing-ms",
            metavar="MS",
            min=0,
            help="Measured time of the same step with rows that need no exchange; corrects the prices.",
        ),
    ] = None,
    row_work_ms: Annotated[
        float,
        typer.Option(
            "--row-work-ms",
            metavar="MS",
            min=0,
            help="Of the computing: look-up, dedup and update of rows, which no prefetch pipeline hides.",
        ),
    ] = 0.0,
    now: Annotated[
        Literal["row_wise", "dedup", "two_hops"], typer.Option("--now", help="Exchange of that training.")
    ] = "row_wise",
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE.npz", exists=True, dir_okay=False, help="Events (docs/demo.md)."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "-c",
            "--config",
            metavar="FILE",
            help="Read the stream of this daemon's YAML file; of a tap, what the daemon has counted.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--for", metavar="SECONDS", help="Longest time to read that stream.", min=1, max=86_400)
    ] = 60.0,
    nodes: NodesOption = 2,
    local_ranks: LocalRanksOption = 2,
    preset: PresetOption = None,
    topology: TopologyOption = None,
    scale: Annotated[
        float, typer.Option("--scale", help="Batch of the job over --batch, where a trace is too small for it.")
    ] = 1.0,
    batch: BatchOption = None,
    micro_batches: MicroBatchesOption = 1,
    history: Annotated[int, typer.Option("--history", help="Rows that a sample looks up.", min=1)] = 32,
    samples: SamplesOption = SampleKind.SEQUENCES,
    lengths: LengthsOption = SampleLengths.FIXED,
    steps: Annotated[int, typer.Option("--steps", help="Training steps to replay.", min=8, max=1_000_000)] = 80,
    dim: DimOption = 64,
    dtype: DTypeOption = "float32",
    optimizer: OptimizerOption = "rowwise_adagrad",
    replica_fraction: ReplicaFractionOption = 0.05,
    price_error: Annotated[
        float, typer.Option("--price-error", help="Relative error of the cluster's prices; widens the ranges.")
    ] = 0.15,
    worth: Annotated[float, typer.Option("--worth", help="Share of the step below which nothing is advised.")] = 0.02,
    seed: SeedOption = 0,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Predict what flexd would save: milliseconds per step, GPU-hours per day, and the memory it takes.

    Needs no daemon and no GPU. Give --trace or --config, and your training's step time.

    Example: flexd advise --step-ms 180 --trace events.npz --nodes 8 --local-ranks 8
    """
    if (trace is None) == (config is None):
        raise ConfigError("no accesses, or two of them", remedy="give --trace or --config")
    from flexd.core.layout import RankLayout
    from flexd.simulate.accesses import RowFormat, profile_accesses
    from flexd.simulate.advice import NOW, AdviceSettings, affinity_of_samples, affinity_of_trace
    from flexd.simulate.advice import advise as advise_on
    from flexd.simulate.simulation import SimulationSettings

    layout = RankLayout(nodes, local_ranks)
    cluster = make_cluster(preset, topology, scale)
    accesses: Accesses
    sampled: CoAccess | None = None
    if config is not None:
        from flexd.daemon.config_file import load_with_known_tables
        from flexd.daemon.stream_sample import read_source

        loaded = load_with_known_tables(config)
        read = read_source(loaded, seconds)
        sampled = read.coaccess
        accesses = profile_accesses(
            loaded.job, read.profile, loaded.keyspace().tables, layout,
            accesses_per_rank=(batch or DRAWN_BATCH) * history, steps=steps, seed=seed, micro_batches=micro_batches,
        )  # fmt: skip
    else:
        row_format = RowFormat(dim, dtype, optimizer)
        options = BatchOptions(history, batch, steps, samples, lengths, micro_batches)
        accesses = make_trace_accesses(trace, layout, row_format, options, seed)
    given = AdviceSettings(
        step_ms / 1e3, None if computing_ms is None else computing_ms / 1e3, row_work_ms / 1e3, NOW[now], scale,
        price_error, worth,
    )  # fmt: skip
    found = advise_on(
        accesses, layout, cluster, SimulationSettings(replica_fraction=replica_fraction), given, show_progress(steps)
    )
    if sampled is None:
        affinity = affinity_of_trace(accesses, layout)
    else:
        affinity = affinity_of_samples(sampled, accesses.keyspace, layout, found.accesses_per_step)
    present(found.model_copy(update={"affinity": affinity}), output)
