"""``demo``: daemon, stream and training on one machine."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flexd.cli.blocks import Block, Facts, Sentences, Table
from flexd.cli.exit_codes import ExitCode
from flexd.cli.options import OutputOption
from flexd.cli.render import OutputFormat, emit
from flexd.cli.simulate_command import LengthsOption, SamplesOption
from flexd.core import units
from flexd.core.errors import ConfigError
from flexd.demo.setup import BATCHES, LEAST_BATCH_SIZE, DemoOptions, EmulatedCluster

KINDS = ("all_to_all", "sync", "migration", "total")
TIMED = {
    "row_wise": "row-wise, no dedup (sharded modules today)",
    "chain": "two-hop chain",
    "prefetch_pipeline": "two-hop chain, prefetch pipeline (flexd.prefetch)",
    "plans": "two-hop chain, the daemon's copies",
}
SENT = {
    "row_wise": "row-wise, no dedup (sharded modules today)",
    "row_wise_dedup": "row-wise, dedup",
    "before": "flexd before the first plan (two-hop chain)",
    "after": "flexd after the last plan",
}


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
    emit(without_nan(summary), summary_blocks(summary), output)
    for text in broken:
        print(f"flexd demo: {text}", file=sys.stderr)
    raise typer.Exit(ExitCode.FAILED if broken else ExitCode.OK)


def without_nan(value: Any) -> Any:
    """Replace NaN, which a diverged run gives and JSON lacks, by None."""
    if isinstance(value, dict):
        return {name: without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary_blocks(summary: dict[str, Any]) -> list[Block]:
    """Return step times and bytes by strategy, what training was like, and why rows have copies."""
    from flexd.simulate.step_keys import touches_in_words

    traffic, times, pause = summary["inter_node_bytes_per_step"], summary["step_ms"], summary["step_pause_ms"]
    link = f"emulated link of {summary['link_mbit']:g} Mbit/s per node and direction"
    timed = tuple(
        (
            text, f"{step['p50']:.1f}", f"{step['p25']:.1f} .. {step['p75']:.1f}",
            f"{step['p50'] / times['strategies']['row_wise']['p50']:.2f}",
        )
        for name, text in TIMED.items()
        if (step := times["strategies"].get(name))
    )  # fmt: skip
    sent = tuple(
        (
            text, *(f"{traffic[name][kind] / 1e6:.3f}" for kind in KINDS),
            f"{traffic[name]['total'] / traffic['row_wise']['total']:.2f}",
        )
        for name, text in SENT.items()
    )  # fmt: skip
    facts = {
        "plans that moved rows": f"{summary['plans']}, {units.plural(summary['migrated_rows'], 'row')} moved",
        "accesses by tier at the end": "  ".join(
            f"{t} {share:.1%}" for t, share in summary["tier_access_share"].items()
        ),
        "loss, first and last tenth": f"{summary['loss']['first']:.4f} -> {summary['loss']['last']:.4f}",
        "replicas bit-equal to their homes": "yes" if summary["replicas_bit_equal"] else "NO",
        "largest difference to single-process training": f"{summary['max_abs_difference_to_single_process']:.2g}",
    }
    if pause["p50"] is not None:
        facts["step time, and pause of steps that moved rows"] = (
            f"{times['p50']:.1f} ms; p50 {pause['p50']:+.1f} ms, p99 {pause['p99']:+.1f} ms"
        )
    run = (
        f"{summary['trace']}: {summary['ranks']} ranks on {summary['nodes']} nodes, {summary['steps']} steps, "
        f"{summary['dtype']}, replica budget {summary['replica_budget']:.0%} of the rows per rank"
    )
    touches = touches_in_words(summary["touches"], summary["nodes"], summary["local_ranks"])
    blocks: list[Block] = [Sentences("", (run, summary["samples"], touches))]
    if timed:
        columns: tuple[str, ...] = ("strategy", "median", "quartiles", "of row-wise")
        blocks.append(Table(f"ms per step over the last tenth; {link}", columns, timed, frozenset(columns[1:])))
    columns = ("strategy", *(kind.replace("_", "-") for kind in KINDS), "of row-wise")
    title = "inter-node MB per step, whole job (counted where it is sent)"
    blocks += [Table(title, columns, sent, frozenset(columns[1:])), Facts("", tuple(facts.items()))]
    if summary["last_plan"]:
        prices = "the emulated link" if summary["link_mbit"] else "a full-size cluster"
        title = f"why the last plan replicates what it does, at the prices of {prices} (per rank and step)"
        blocks.append(Sentences(title, tuple(summary["last_plan"]["why"])))
    return blocks
