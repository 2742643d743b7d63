"""Live progress of the demo on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def live_progress() -> Progress:
    """Return a line of progress on stderr with a text that changes; silent where there is no terminal."""
    console = Console(stderr=True)
    return Progress(
        BarColumn(bar_width=8), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip


def describe(newest: list[dict[str, Any]], status: dict[str, Any] | None) -> str:
    """Return the mean loss of the newest step, and what the daemon has done."""
    loss = f"loss {sum(record['loss'] for record in newest) / len(newest):.4f}, " if newest else ""
    if status is None:
        return f"{loss}the daemon does not respond (training continues)"
    stream, rows = status["stream"], status["placement"].get("rows") or {}
    replicated = sum(count for tier, count in rows.items() if tier != "HOME")
    return f"{loss}{stream['accesses']:,} accesses read, {replicated:,} rows replicated"
