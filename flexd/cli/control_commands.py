"""``replan``, ``pause`` and ``resume``: what changes something."""

from __future__ import annotations

from typing import Annotated

import typer

from flexd.cli.exit_codes import ExitCode
from flexd.cli.options import BY_HAND, OutputOption, ReasonOption, SocketOption, UrlOption, connect
from flexd.cli.status_view import replan_blocks
from flexd.cli.view import OutputFormat, Sentences, emit
from flexd.server.verbs import PauseState, ReplanOutcome

_EXIT_OF: dict[ReplanOutcome, ExitCode] = {
    "timed_out": ExitCode.TIMED_OUT,
    "failed": ExitCode.REFUSED,
    "aborted": ExitCode.REFUSED,
    "superseded": ExitCode.REFUSED,
}


def replan(
    wait: Annotated[bool, typer.Option("--wait", help="Wait until every rank has applied the migration.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=0, max=3600, help="How long to wait, in seconds.")
    ] = 300.0,
    reason: ReasonOption = BY_HAND,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Plans now and pushes the migration to the ranks.

    With --wait the exit status is 0 once every rank has it, 4 if the migration ended otherwise, 5 at the timeout.

    Example: flexd replan --wait --reason "campaign starts"
    """
    result = connect(url, socket).replan(reason, timeout if wait else 0.0)
    emit(result, replan_blocks(result), output)
    raise typer.Exit(_EXIT_OF.get(result.outcome, ExitCode.OK))


def pause(
    reason: ReasonOption = BY_HAND,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Holds planning and pushing at the next chunk; the stream is still read, the training is not touched.

    Example: flexd pause --reason maintenance
    """
    state = connect(url, socket).pause(reason)
    emit(state, [_sentence(state)], output)


def resume(url: UrlOption = None, socket: SocketOption = None, output: OutputOption = OutputFormat.TABLE) -> None:
    """Ends a pause.

    Example: flexd resume
    """
    state = connect(url, socket).resume()
    emit(state, [_sentence(state)], output)


def _sentence(state: PauseState) -> Sentences:
    word = "paused" if state.paused else "running"
    text = word if state.changed else f"already {word}"
    return Sentences("", (f"{text}: {state.reason}" if state.paused and state.reason else text,))
