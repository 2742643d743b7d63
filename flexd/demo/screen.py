"""Terminal output of the demo: live progress and the summary."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flexd.simulate.step_keys import touches_in_words

KINDS = ("all_to_all", "sync", "migration", "total")
TIMED = {
    "row_wise": "row-wise, no dedup (sharded modules today)",
    "chain": "two-hop chain",
    "run_ahead": "two-hop chain, run-ahead (flexd.prefetch)",
    "plans": "two-hop chain, the daemon's copies",
}
STRATEGIES = {
    "row_wise": "row-wise, no dedup (sharded modules today)",
    "row_wise_dedup": "row-wise, dedup",
    "before": "flexd before the first plan (two-hop chain)",
    "after": "flexd after the last plan",
}


def megabytes(count: float) -> str:
    return f"{count / 1e6:.3f}"


class LiveView:
    """A screen that ``update`` refreshes; silent where there is no terminal."""

    def __init__(self, steps: int, *, enabled: bool) -> None:
        self._console = Console(stderr=True)
        self._enabled = enabled and self._console.is_terminal
        self._progress = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn()
        )
        self._task = self._progress.add_task("steps", total=steps)
        self._live: Any = None

    def __enter__(self) -> LiveView:
        if self._enabled:
            from rich.live import Live

            self._live = Live(self._progress, console=self._console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.__exit__(*error)

    def print(self, text: str) -> None:
        if self._enabled:
            self._console.print(text)

    def update(self, step: int, newest: list[dict[str, Any]], status: dict[str, Any] | None) -> None:
        if self._live is None:
            return
        self._progress.update(self._task, completed=step)
        table = Table.grid(padding=(0, 2))
        if newest:
            accesses = [sum(record[f"{tier}_accesses"] for record in newest) for tier in ("home", "node", "device")]
            total = max(1, sum(accesses))
            inter = sum(record["all_to_all_inter_bytes"] + record["sync_inter_bytes"] for record in newest)
            table.add_row("loss", f"{sum(record['loss'] for record in newest) / len(newest):.4f}")
            table.add_row("placement version", str(newest[0]["version"]))
            table.add_row("inter-node MB/step", megabytes(inter))
            table.add_row(
                "accesses by tier",
                "  ".join(f"{n} {a / total:.0%}" for n, a in zip(("home", "node", "device"), accesses, strict=True)),
            )
        table.add_row("daemon", describe_daemon(status))
        self._live.update(Group(self._progress, table))


def describe_daemon(status: dict[str, Any] | None) -> str:
    if status is None:
        return "not answering (training continues)"
    stream, placement = status["stream"], status["placement"]
    rows = placement.get("rows") or {}
    replicated = sum(count for tier, count in rows.items() if tier != "HOME")
    return f"{stream['accesses']:,} accesses read, lag {stream['lag_messages']}, {replicated:,} rows replicated"


def _step_times(summary: dict[str, Any]) -> Table:
    times = summary["step_ms"]["strategies"]
    table = Table(
        title=f"ms a step over the last tenth; emulated link of {summary['link_mbit']:g} Mbit/s a node and direction",
        title_justify="left",
    )
    for heading in ("strategy", "median", "quartiles", "of row-wise"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for name, text in TIMED.items():
        step = times[name]
        share = step["p50"] / times["row_wise"]["p50"]
        table.add_row(text, f"{step['p50']:.1f}", f"{step['p25']:.1f} .. {step['p75']:.1f}", f"{share:.2f}")
    return table


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """Print the summary as tables."""
    console.print(
        f"[bold]{summary['trace']}[/]: {summary['ranks']} ranks on {summary['nodes']} nodes, {summary['steps']} steps, "
        f"{summary['dtype']}, replica budget {summary['replica_budget']:.0%} of the rows per rank"
    )
    console.print(summary["samples"])
    console.print(f"{touches_in_words(summary['touches'], summary['nodes'], summary['local_ranks'])}\n")
    if summary["step_ms"]["strategies"]:
        console.print(_step_times(summary))
    traffic = summary["inter_node_bytes_per_step"]
    table = Table(title="inter-node MB per step, whole job (counted where it is sent)", title_justify="left")
    table.add_column("strategy")
    for kind in KINDS:
        table.add_column(kind.replace("_", "-"), justify="right")
    table.add_column("of row-wise", justify="right")
    for name, text in STRATEGIES.items():
        parts = traffic[name]
        share = parts["total"] / traffic["row_wise"]["total"]
        table.add_row(text, *(megabytes(parts[kind]) for kind in KINDS), f"{share:.2f}")
    console.print(table)
    shares = "  ".join(f"{tier} {share:.1%}" for tier, share in summary["tier_access_share"].items())
    pause = summary["step_pause_ms"]
    facts = Table.grid(padding=(0, 2))
    facts.add_row("plans that moved rows", f"{summary['plans']}, {summary['migrated_rows']:,} rows moved")
    facts.add_row("accesses by tier at the end", shares)
    facts.add_row("loss, first and last tenth", f"{summary['loss']['first']:.4f} -> {summary['loss']['last']:.4f}")
    facts.add_row("replicas bit-equal to their homes", "yes" if summary["replicas_bit_equal"] else "NO")
    facts.add_row(
        "largest difference to single-process training", f"{summary['max_abs_difference_to_single_process']:.2g}"
    )
    if pause["p50"] is not None:
        facts.add_row(
            "step time, and pause of steps that moved rows",
            f"{summary['step_ms']['p50']:.1f} ms; p50 {pause['p50']:+.1f} ms, p99 {pause['p99']:+.1f} ms",
        )
    console.print(facts)
    if summary["last_plan"]:
        prices = "the emulated link" if summary["link_mbit"] else "a full-size cluster"
        console.print(f"\nWhy the last plan replicates what it does, at the prices of {prices} (per rank and step):")
        for sentence in summary["last_plan"]["why"]:
            console.print(f"  - {sentence}")
