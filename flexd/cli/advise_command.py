"""``advise``: is flexd worth it for a training, before anything is installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flexd.cli.blocks import Block, Facts, Sentences, Table
from flexd.cli.options import OutputOption
from flexd.cli.render import OutputFormat, emit
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
from flexd.core import units
from flexd.core.errors import ConfigError
from flexd.stream.sample_kinds import BatchOptions, SampleKind, SampleLengths

if TYPE_CHECKING:
    from flexd.planner.model.cost import PredictedRange
    from flexd.simulate.accesses import Accesses
    from flexd.simulate.advice import Advice, Prediction
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
    from flexd.simulate.advice import NOW, AdviceSettings, affinity_outlook, outlook_of_samples
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
    answer, blocks = document(found), advice_blocks(found)
    affinity = affinity_outlook(accesses, layout)
    if sampled is not None:
        affinity = outlook_of_samples(sampled, accesses.keyspace, layout, found.simulation.accesses_per_step)
    if affinity is not None:
        answer["affinity"] = {"messages": affinity.messages, **asdict(affinity.forecast)}
        blocks.append(Sentences("affinity", affinity.messages))
    emit(answer, blocks, output)


def document(advice: Advice) -> dict[str, Any]:
    """Return the answer, JSON-able, with units in the names."""
    simulation = advice.simulation
    return {
        "accesses": simulation.accesses.name,
        "nodes": simulation.layout.nodes,
        "local_ranks": simulation.layout.local_ranks,
        "cluster": simulation.cluster.name,
        "accesses_per_step": simulation.accesses_per_step,
        "now": advice.now.name,
        "step_seconds": advice.step_seconds,
        "exchange_seconds": advice.exchange_seconds,
        "price_correction": advice.price_correction,
        "reused_share": advice.reused_share,
        "price_error": advice.price_error,
        "worth": advice.worth,
        "options": {name: _prediction(found) for name, found in advice.predictions.items()},
        "best": None if advice.best is None else advice.best.option.name,
        "messages": messages(advice),
    }


def _prediction(found: Prediction) -> dict[str, Any]:
    def three(given: PredictedRange) -> dict[str, float]:
        return {"expected": given.expected, "low": given.low, "high": given.high}

    return {
        "title": found.option.title,
        "step_seconds": three(found.step_seconds),
        "saved_seconds": three(found.saved_seconds),
        "saved_share": three(found.saved_share),
        "gpu_hours_per_day": three(found.gpu_hours_per_day),
        "inter_node_bytes": found.inter_node_bytes,
        "extra_memory_bytes": found.extra_memory_bytes,
        "pays": found.pays,
    }


def messages(advice: Advice) -> list[str]:
    """Return the answer in sentences, the verdict first."""
    said = []
    if not advice.prices_fit:
        said.append(
            f"The prices do not fit: they give today's exchange {units.seconds(advice.exchange_seconds)}, more than "
            f"the whole step of {units.seconds(advice.step_seconds)}. Measure them with flexd probe, give "
            "--computing-ms, check --now and --scale; until then nothing is advised."
        )
    elif advice.best is None:
        share = advice.exchange_seconds / advice.step_seconds
        said.append(
            f"No gain expected: no option saves {units.share(advice.worth)} of a step for certain. The exchange is "
            f"{units.seconds(advice.exchange_seconds)} ({units.share(share)}) of a step of "
            f"{units.seconds(advice.step_seconds)}."
        )
    else:
        best = advice.best
        said.append(
            f"Worth it: {best.option.title} takes {units.seconds(best.step_seconds.expected)} a step instead of "
            f"{units.seconds(advice.step_seconds)}, {in_range(best.saved_share, units.share)} less, which is "
            f"{in_range(best.gpu_hours_per_day, hours)} GPU-hours per day for the job."
        )
        copies = advice.predictions["copies_prefetch_pipeline" if best.option.prefetch_pipeline else "copies"]
        plain = "two_hops_prefetch_pipeline" if best.option.prefetch_pipeline else "two_hops"
        if best is not copies and plain in advice.predictions:
            gain = advice.predictions[plain].step_seconds.expected - copies.step_seconds.expected
            if gain < advice.worth * advice.step_seconds:
                said.append(
                    f"Copies of hot rows, which the daemon plans, {_change(gain)} beside the same without them: the "
                    "trainer's side alone does it here."
                )
    if advice.price_correction != 1.0:
        said.append(
            f"The prices were multiplied by {advice.price_correction:.2g}, so that today's exchange takes what "
            "computing leaves of the step. Far from 1 they do not describe this network: measure it with flexd probe."
        )
    said.append(
        f"Of a batch's rows {units.share(advice.reused_share)} were touched by the step before; the prefetch pipeline "
        "fetches the others beside computing. Ranges: steps that differ, and "
        f"prices wrong by {units.share(advice.price_error)}."
    )
    return said


def _change(seconds: float) -> str:
    if seconds == 0:
        return "change nothing"
    return f"save {units.seconds(seconds)} a step" if seconds > 0 else f"cost {units.seconds(-seconds)} a step"


def advice_blocks(advice: Advice) -> list[Block]:
    """Return the verdict, the facts and the options."""
    simulation = advice.simulation
    facts = Facts(
        "",
        (
            ("accesses", f"{simulation.accesses.name}, {units.count(simulation.accesses_per_step)} a step of the job"),
            (
                "cluster",
                f"{simulation.layout.nodes} nodes x {simulation.layout.local_ranks} ranks, priced as "
                f"{simulation.cluster.name}",
            ),
            (
                "today",
                f"{advice.now.title}: {units.seconds(advice.step_seconds)} a step, of it exchange "
                f"{units.seconds(advice.exchange_seconds)} by the prices",
            ),
        ),
    )
    columns = (
        "option",
        "step",
        "saved per step",
        "of a step",
        "GPU-hours per day",
        "memory per rank",
        "inter-node bytes",
    )
    rows = tuple(
        (
            found.option.title,
            units.seconds(found.step_seconds.expected),
            in_range(found.saved_seconds, units.seconds),
            units.share(found.saved_share.expected),
            hours(found.gpu_hours_per_day.expected),
            units.size(found.extra_memory_bytes),
            units.size(found.inter_node_bytes),
        )
        for found in advice.predictions.values()
    )
    spare = ("inter-node bytes", "memory per rank")
    return [
        Sentences("", tuple(messages(advice))), facts, Table("predicted", columns, rows, frozenset(columns[1:]), spare)
    ]  # fmt: skip


def hours(value: float) -> str:
    return f"{value:.3g}"


def in_range(given: PredictedRange, form: Callable[[float], str]) -> str:
    """``2 s (1 s to 3 s)``."""
    return f"{form(given.expected)} ({form(given.low)} to {form(given.high)})"
