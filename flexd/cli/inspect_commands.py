"""``status`` and ``plan``."""

from __future__ import annotations

from typing import Annotated

import typer

from flexd.cli.options import OutputOption, SocketOption, UrlOption, connect
from flexd.cli.plan_view import plan_blocks
from flexd.cli.status_view import status_blocks
from flexd.cli.view import OutputFormat, emit
from flexd.cli.watch import Answer, WatchOption, emit_watched


def status(
    watch: WatchOption = None,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Shows the daemon on one screen: health, stream, sketch, ranks, placement, last plan and migration.

    Example: flexd status -o json
    """
    client = connect(url, socket)

    def ask() -> Answer:
        answer = client.status()
        return answer, status_blocks(answer)

    emit_watched(ask, output, watch)


def plan(
    plan_id: Annotated[
        str | None, typer.Argument(metavar="PLAN_ID", help="Show a kept plan (or: latest) instead of making one.")
    ] = None,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Dry run: what a re-plan would change now, its cost before and after by phase and link, and why.

    The plan is kept: flexd apply carries it out while ranks, placement and accesses stay as they are.

    Example: flexd plan
    Example: flexd plan latest
    """
    client = connect(url, socket)
    answer = client.plan() if plan_id is None else client.proposal(plan_id)
    emit(answer, plan_blocks(answer), output)
