"""Commands that replay accesses or train on this machine: ``simulate``, ``advise`` and ``demo``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flexd.cli.client import ExitCode
from flexd.cli.options import OutputOption
from flexd.cli.render import OutputFormat, present
from flexd.core.errors import ConfigError
from flexd.demo.setup import DemoOptions, LengthsOption, SamplesOption
from flexd.stream.sample_kinds import BatchOptions, SampleKind, SampleLengths

if TYPE_CHECKING:
    from flexd.core.keyspace import TableSpec
    from flexd.core.placement import RankLayout
    from flexd.daemon.stream_sample import StreamRead
    from flexd.simulate.accesses import Accesses
    from flexd.topology.cluster import Cluster


DEFAULT_PRESET = "azure-a100-200g"
DRAWN_BATCH = 512
"""Samples of a rank and step where look-ups are drawn."""
# As in flexd.core.keyspace, which imports numpy: a client command does not wait for it.
DTypeOption = Annotated[
    Literal["float64", "float32", "float16", "bfloat16"], typer.Option("--dtype", help="Type of the rows.")
]
OptimizerOption = Annotated[
    Literal["sgd", "rowwise_adagrad", "adagrad", "adam", "rowwise_adam"],
    typer.Option("--optimizer", help="Optimizer, whose state migrates with a row and is in each copy."),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of random numbers.", min=0)]


@dataclass(frozen=True)
class ClusterOptions:
    """Ranks, and the cluster that prices what they exchange."""

    nodes: Annotated[int, typer.Option("--nodes", help="Nodes.", min=1, max=4096)] = 2
    local_ranks: Annotated[int, typer.Option("--local-ranks", help="Ranks in each node.", min=1, max=64)] = 2
    preset: Annotated[
        str | None, typer.Option("--preset", help=f"Cluster that prices the exchange. [default: {DEFAULT_PRESET}]")
    ] = None
    topology: Annotated[
        Path | None,
        typer.Option(
            "--topology", metavar="FILE.yaml", help="Topology file that prices the exchange, from flexd probe."
        ),
    ] = None

    def layout(self) -> RankLayout:
        from flexd.core.placement import RankLayout

        return RankLayout(self.nodes, self.local_ranks)

    def load(self, scale: float = 1.0) -> Cluster:
        """``scale``: bytes of a step of the job over those of the replay; divides latencies."""
        from flexd.topology.files import load_cluster, load_preset, scale_model

        if self.preset is not None and self.topology is not None:
            raise ConfigError("--preset and --topology", remedy="give one of them")
        if self.topology is not None:
            return scale_model(load_cluster(self.topology), scale)
        return scale_model(load_preset(self.preset or DEFAULT_PRESET), scale)


@dataclass(frozen=True)
class ReplayOptions:
    """Batches that are replayed, and what a row is."""

    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            help="Samples of each rank in a step, or micro-batch. [default: 512, or what the trace has]",
            min=1,
        ),
    ] = None
    micro_batches: Annotated[
        int, typer.Option("--micro-batches", help="Forward and backward passes of each step.", min=1, max=4096)
    ] = 1
    history: Annotated[
        int, typer.Option("--history", help="Rows that a sample looks up; of a trace, besides its target.", min=1)
    ] = 32
    samples: SamplesOption = SampleKind.SEQUENCES
    lengths: LengthsOption = SampleLengths.FIXED
    dim: Annotated[int, typer.Option("--dim", help="Numbers in a row.", min=1, max=65_536)] = 64
    dtype: DTypeOption = "float32"
    optimizer: OptimizerOption = "rowwise_adagrad"
    replica_fraction: Annotated[
        float, typer.Option("--replica-fraction", help="Replica slots of a rank, as a share of all rows.")
    ] = 0.05
    seed: SeedOption = 0

    def row(self) -> TableSpec:
        from flexd.core.keyspace import TableSpec

        return TableSpec("rows", 1, self.dim, self.dtype, self.optimizer)

    def of_trace(self, path: Path | None, layout: RankLayout, steps: int) -> Accesses:
        """Return the accesses of a trace; None: of the built-in one."""
        from flexd.simulate.accesses import trace_accesses
        from flexd.stream.trace import built_in_trace, load_trace

        events = built_in_trace(self.seed) if path is None else load_trace(path)
        options = BatchOptions(self.history, self.batch, steps, self.samples, self.lengths, self.micro_batches)
        return trace_accesses("built-in trace" if path is None else path.stem, events, layout, self.row(), options)

    def of_config(self, file: Path, seconds: float, layout: RankLayout, steps: int) -> tuple[Accesses, StreamRead]:
        """Return accesses drawn from the stream of a daemon's file, and what was read of it."""
        from flexd.daemon.config_file import load_with_known_tables
        from flexd.daemon.stream_sample import read_source
        from flexd.simulate.accesses import profile_accesses

        loaded = load_with_known_tables(file)
        read = read_source(loaded, seconds)
        accesses = profile_accesses(
            loaded.job, read.profile, loaded.keyspace().tables, layout,
            accesses_per_rank=(self.batch or DRAWN_BATCH) * self.history, steps=steps, seed=self.seed,
            micro_batches=self.micro_batches,
        )  # fmt: skip
        return accesses, read


StreamOption = Annotated[
    Path | None,
    typer.Option(
        "-c", "--config", metavar="FILE",
        help="Read the stream of this daemon's YAML file; of a tap, what the daemon has counted.",
    ),
]  # fmt: skip
ReadingOption = Annotated[
    float, typer.Option("--for", metavar="SECONDS", help="Longest time to read that stream.", min=1, max=86_400)
]


@dataclass(frozen=True)
class ZipfOptions:
    """A stream that is drawn."""

    zipf: Annotated[
        float | None, typer.Option("--zipf", metavar="EXPONENT", help="Simulate a Zipf stream instead.")
    ] = None
    rows: Annotated[int, typer.Option("--rows", help="Rows of the Zipf stream's table.")] = 1_000_000
    drift: Annotated[float, typer.Option("--drift", help="New top rows of the Zipf stream per step.")] = 0.0


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Options of ``flexd simulate``."""

    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE.npz",
            exists=True,
            dir_okay=False,
            help="Events to replay (docs/demo.md); default: drifting Zipf with users.",
        ),
    ] = None
    config: StreamOption = None
    seconds: ReadingOption = 60.0
    drawn: ZipfOptions
    cluster: ClusterOptions
    scale: Annotated[
        float,
        typer.Option("--scale", help="Bytes of a step of the job over those of the replay; divides latencies."),
    ] = 1.0
    replay: ReplayOptions
    steps: Annotated[int, typer.Option("--steps", help="Training steps.", min=4, max=1_000_000)] = 300
    interval_steps: Annotated[int, typer.Option("--interval-steps", help="Steps between two plans.", min=1)] = 5
    half_life_steps: Annotated[
        float,
        typer.Option("--half-life-steps", help="Steps in which an access loses half its weight; inf disables decay."),
    ] = 20.0
    horizon_steps: Annotated[
        float, typer.Option("--horizon-steps", help="Steps within which a migration must pay for itself.")
    ] = 300.0
    output: OutputOption = OutputFormat.TABLE


def simulate(given: SimulateOptions) -> None:
    """Replay accesses through planners and count the bytes moved.

    Compares row-wise sharding, two-hop, one plan for ever, re-planning, and an oracle.

    Example: flexd simulate --trace events.npz --scale 5000
    """
    drawn, replay, steps = given.drawn, given.replay, given.steps
    chosen = {"--trace": given.trace, "--config": given.config, "--zipf": drawn.zipf}
    if len(both := [name for name, value in chosen.items() if value is not None]) > 1:
        raise ConfigError(" and ".join(both), remedy="give one of them")
    from flexd.simulate.accesses import zipf_accesses
    from flexd.simulate.simulation import SimulationSettings, simulate
    from flexd.simulate.summary import summarise

    layout = given.cluster.layout()
    settings = SimulationSettings(
        replica_fraction=replay.replica_fraction,
        interval_steps=given.interval_steps,
        half_life_steps=given.half_life_steps,
        horizon_steps=given.horizon_steps,
    )
    cluster = given.cluster.load(given.scale)
    if given.config is not None:
        accesses, _ = replay.of_config(given.config, given.seconds, layout, steps)
    elif drawn.zipf is None:
        accesses = replay.of_trace(given.trace, layout, steps)
    else:
        accesses = zipf_accesses(
            layout, replay.row(), table_rows=drawn.rows, exponent=drawn.zipf, drift_rows=drawn.drift,
            accesses_per_rank=(replay.batch or DRAWN_BATCH) * (replay.history + 1), steps=steps, seed=replay.seed,
            micro_batches=replay.micro_batches,
        )  # fmt: skip
    present(summarise(simulate(accesses, layout, cluster, settings, progress=show_progress(steps))), given.output)


def show_progress(steps: int) -> Callable[[int], None] | None:
    """Return a callback that shows progress on a terminal; None in a pipe."""
    if not sys.stderr.isatty():
        return None

    def show(step: int) -> None:
        end = "\n" if step + 1 == steps else ""
        print(f"\rstep {step + 1} of {steps}", end=end, file=sys.stderr, flush=True)

    return show


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
    config: StreamOption = None
    seconds: ReadingOption = 60.0
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
        problem = "no accesses to advise on" if given.trace is None else "--trace and --config are given"
        raise ConfigError(problem, remedy="give a trace (--trace FILE) or a daemon's configuration (--config FILE)")
    from flexd.core.stream_ids import IdsOfStream
    from flexd.simulate.advice import NOW, AdviceSettings, affinity_of_samples, affinity_of_trace
    from flexd.simulate.advice import advise as advise_on
    from flexd.simulate.simulation import SimulationSettings

    layout, measured, replay = given.cluster.layout(), given.measured, given.replay
    cluster, read = given.cluster.load(given.scale), None
    if given.config is None:
        accesses = replay.of_trace(given.trace, layout, given.steps)
    else:
        accesses, read = replay.of_config(given.config, given.seconds, layout, given.steps)
    settings = AdviceSettings(
        measured.step_ms / 1e3, None if measured.computing_ms is None else measured.computing_ms / 1e3,
        measured.row_work_ms / 1e3, NOW[measured.now], given.scale, given.price_error, given.worth,
    )  # fmt: skip
    simulated = SimulationSettings(replica_fraction=replay.replica_fraction)
    found = advise_on(accesses, layout, cluster, simulated, settings, show_progress(given.steps))
    if read is None or read.coaccess is None:
        affinity = affinity_of_trace(accesses, layout)
    else:
        affinity = affinity_of_samples(read.coaccess, accesses.keyspace, layout, found.accesses_per_step)
    ids = () if read is None else IdsOfStream.of_tables(read.ids, accesses.keyspace.tables)
    present(found.model_copy(update={"affinity": affinity, "unbounded_ids": ids}), given.output)


@dataclass(frozen=True, kw_only=True)
class DemoCommand:
    """Options of ``flexd demo``."""

    options: DemoOptions
    output: OutputOption = OutputFormat.TABLE


def demo(given: DemoCommand) -> None:
    """Train a small model with a daemon beside it.

    Daemon, stream and training ranks are real processes; the model predicts the next
    item. Prints the step time of several exchanges over an emulated link, and inter-node bytes.

    Example: flexd demo --steps 200
    """
    if given.options.tap and given.options.kafka is not None:
        raise ConfigError("--tap with --kafka", remedy="ranks that count need no broker: give one of them")
    from flexd.demo.runner import run_demo

    summary, broken = run_demo(given.options)
    present(summary, given.output)
    for text in broken:
        print(f"flexd demo: {text}", file=sys.stderr)
    raise typer.Exit(ExitCode.FAILED if broken else ExitCode.OK)
