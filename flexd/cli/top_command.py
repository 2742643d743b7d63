"""``top``: the daemon live on one screen."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from pydantic import Field

from flexd.api.base import Model
from flexd.api.rank import RankPage
from flexd.api.status import Status
from flexd.api.table import TablePage
from flexd.api.timeline import Timeline
from flexd.cli.blocks import Block
from flexd.cli.client import DaemonClient
from flexd.cli.options import OutputOption, SocketOption, UrlOption, connect
from flexd.cli.top_view import RANKS, TABLES, top_blocks
from flexd.cli.view import OutputFormat, emit
from flexd.core.errors import FlexdError


class Screen(Model):
    """All that ``top`` shows."""

    status: Status
    """The daemon."""
    timeline: Timeline = Field(default_factory=lambda: Timeline(interval_seconds=0.0))
    """Recent traffic."""
    ranks: RankPage
    """The first ranks."""
    tables: TablePage
    """The most accessed tables."""

    def blocks(self) -> list[Block]:
        return top_blocks(self.status, self.timeline, self.ranks, self.tables)


def top(
    every: Annotated[
        float, typer.Option("-d", "--delay", metavar="S", min=0.2, max=3600, help="Between two looks, in seconds.")
    ] = 2.0,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Shows the daemon live: traffic against row-wise sharding, tiers, ranks, migration, tables. Control-C ends it.

    In a pipe, or with -o json, it looks once.

    Example: flexd top --delay 1
    """
    client = connect(url, socket)
    if output is not OutputFormat.TABLE or not sys.stdout.isatty():
        screen = _look(client)
        emit(screen, screen.blocks(), output)
        return
    _live(client, every)


def _look(client: DaemonClient) -> Screen:
    return Screen(
        status=client.status(),
        timeline=client.timeline(),
        ranks=client.ranks(0, RANKS),
        tables=client.tables(0, TABLES, "accesses"),
    )


def _live(client: DaemonClient, every: float) -> None:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from flexd.cli.screen import renderable

    console = Console(highlight=False)
    # The first look fails as any command does; later ones wait for a daemon that restarts.
    screen, problem = _look(client), ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                heading = Text(f"flexd top, every {every:g} s (Control-C ends) {problem}", style="dim")
                live.update(Group(heading, Text(""), renderable(screen.blocks())), refresh=True)
                time.sleep(every)
                try:
                    screen, problem = _look(client), ""
                except FlexdError as error:
                    problem = f"- {error.message}"
        except KeyboardInterrupt:
            pass
