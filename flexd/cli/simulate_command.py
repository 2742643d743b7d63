"""``simulate``: replays accesses through planners and counts the bytes that would move."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flexd.cli.options import OutputOption
from flexd.cli.render import OutputFormat, present
from flexd.core.errors import ConfigError
from flexd.stream.sample_kinds import BatchOptions, SampleKind, SampleLengths

if TYPE_CHECKING:
    from flexd.core.layout import RankLayout
    from flexd.simulate.accesses import Accesses, RowFormat
    from flexd.topology.cluster import Cluster


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


DRAWN_BATCH = 512
"""Samples of a rank and step where look-ups are drawn."""


def simulate(
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE.npz",
            exists=True,
            dir_okay=False,
            help="Events to replay (docs/demo.md); default: drifting Zipf with users.",
        ),
    ] = None,
    zipf: Annotated[
        float | None, typer.Option("--zipf", metavar="EXPONENT", help="Simulate a Zipf stream instead.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", help="Rows of the Zipf stream's table.")] = 1_000_000,
    drift: Annotated[float, typer.Option("--drift", help="New top rows of the Zipf stream per step.")] = 0.0,
    nodes: NodesOption = 2,
    local_ranks: LocalRanksOption = 2,
    preset: PresetOption = None,
    topology: TopologyOption = None,
    scale: Annotated[
        float,
        typer.Option("--scale", help="Bytes of a step of the job over those of the replay; divides latencies."),
    ] = 1.0,
    replica_fraction: ReplicaFractionOption = 0.05,
    batch: BatchOption = None,
    micro_batches: MicroBatchesOption = 1,
    history: Annotated[
        int, typer.Option("--history", help="Rows that a sample looks up, besides its target.", min=1)
    ] = 32,
    samples: SamplesOption = SampleKind.SEQUENCES,
    lengths: LengthsOption = SampleLengths.FIXED,
    steps: Annotated[int, typer.Option("--steps", help="Training steps.", min=4, max=1_000_000)] = 300,
    dim: DimOption = 64,
    dtype: DTypeOption = "float32",
    optimizer: OptimizerOption = "rowwise_adagrad",
    interval_steps: Annotated[int, typer.Option("--interval-steps", help="Steps between two plans.", min=1)] = 5,
    half_life_steps: Annotated[
        float,
        typer.Option("--half-life-steps", help="Steps in which an access loses half its weight; inf disables decay."),
    ] = 20.0,
    horizon_steps: Annotated[
        float, typer.Option("--horizon-steps", help="Steps within which a migration must pay for itself.")
    ] = 300.0,
    seed: SeedOption = 0,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Replay accesses through planners and count the bytes moved.

    Compares row-wise sharding, two-hop, one plan for ever, re-planning, and an oracle.

    Example: flexd simulate --trace events.npz --scale 5000
    """
    if trace is not None and zipf is not None:
        raise ConfigError("--trace and --zipf", remedy="give one of them")
    from flexd.core.layout import RankLayout
    from flexd.simulate.accesses import RowFormat, zipf_accesses
    from flexd.simulate.simulation import SimulationSettings, simulate
    from flexd.simulate.summary import summarise

    layout = RankLayout(nodes, local_ranks)
    settings = SimulationSettings(
        replica_fraction=replica_fraction,
        interval_steps=interval_steps,
        half_life_steps=half_life_steps,
        horizon_steps=horizon_steps,
    )
    cluster = make_cluster(preset, topology, scale)
    row_format = RowFormat(dim, dtype, optimizer)
    if zipf is not None:
        accesses = zipf_accesses(
            layout, row_format, table_rows=rows, exponent=zipf, drift_rows=drift,
            accesses_per_rank=(batch or DRAWN_BATCH) * (history + 1), steps=steps, seed=seed,
            micro_batches=micro_batches,
        )  # fmt: skip
    else:
        options = BatchOptions(history, batch, steps, samples, lengths, micro_batches)
        accesses = make_trace_accesses(trace, layout, row_format, options, seed)
    simulation = simulate(accesses, layout, cluster, settings, progress=show_progress(steps))
    present(summarise(simulation), output)


def make_cluster(preset: str | None, topology: Path | None, scale: float) -> Cluster:
    from flexd.topology.files import load_cluster, load_preset, scale_model

    if preset is not None and topology is not None:
        raise ConfigError("--preset and --topology", remedy="give one of them")
    cluster = load_cluster(topology) if topology is not None else load_preset(preset or DEFAULT_PRESET)
    return scale_model(cluster, scale)


def make_trace_accesses(
    path: Path | None,
    layout: RankLayout,
    row_format: RowFormat,
    options: BatchOptions,
    seed: int,
) -> Accesses:
    from flexd.simulate.accesses import trace_accesses
    from flexd.stream.trace import built_in_trace, load_trace

    events = built_in_trace(seed) if path is None else load_trace(path)
    name = "built-in trace" if path is None else path.stem
    return trace_accesses(name, events, layout, row_format, options)


def show_progress(steps: int) -> Callable[[int], None] | None:
    """Return a callback that shows progress on a terminal; None in a pipe."""
    if not sys.stderr.isatty():
        return None

    def show(step: int) -> None:
        end = "\n" if step + 1 == steps else ""
        print(f"\rstep {step + 1} of {steps}", end=end, file=sys.stderr, flush=True)

    return show
