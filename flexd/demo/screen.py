"""Live progress of the demo on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flexd.core import units


class LiveView:
    """A screen that ``update`` refreshes; silent where there is no terminal."""

    def __init__(self, steps: int) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn()
        )
        self._task = self._progress.add_task("steps", total=steps)
        self._live: Any = None

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(self._progress, console=self._console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.__exit__(*error)

    def print(self, text: str) -> None:
        if self._live is not None:
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
            table.add_row("inter-node bytes per step", units.size(inter))
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
