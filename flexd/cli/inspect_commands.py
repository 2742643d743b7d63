"""``status`` and ``plan``: what changes nothing."""

from __future__ import annotations

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


def plan(url: UrlOption = None, socket: SocketOption = None, output: OutputOption = OutputFormat.TABLE) -> None:
    """Dry run: what a re-plan would change now, its cost before and after by phase and link, and why.

    Example: flexd plan
    """
    answer = connect(url, socket).plan()
    emit(answer, plan_blocks(answer), output)
