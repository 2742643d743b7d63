"""``pause`` and ``resume``."""

from __future__ import annotations

from flexd.api import routes
from flexd.api.pause import PauseState
from flexd.api.status import Status
from flexd.cli.blocks import Sentences
from flexd.cli.interactive import DryRunOption, YesOption, confirm
from flexd.cli.options import BY_HAND, OutputOption, ReasonOption, SocketOption, UrlOption, connect, who
from flexd.cli.view import OutputFormat, emit


def pause(
    reason: ReasonOption = BY_HAND,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Stop planning, and stop migrations at the next chunk.

    The stream is still read, and training is not affected. The pause lasts until flexd resume, also over a restart of
    the daemon.

    Example: flexd pause --yes --reason maintenance
    """
    client = connect(url, socket)
    if dry_run:
        _emit_state(_as_it_would_be(client.send(routes.STATUS), paused=True, reason=reason), output)
        return
    confirm("No plan is made and no chunk pushed until flexd resume. Pause?", yes)
    _emit_state(client.send(routes.PAUSE, reason=reason, who=who()), output)


def resume(
    reason: ReasonOption = BY_HAND,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """End a pause.

    Example: flexd resume --yes
    """
    client = connect(url, socket)
    if dry_run:
        _emit_state(_as_it_would_be(client.send(routes.STATUS), paused=False, reason=None), output)
        return
    confirm("Plans are made and chunks pushed again. Resume?", yes)
    _emit_state(client.send(routes.RESUME, reason=reason, who=who()), output)


def _as_it_would_be(status: Status, *, paused: bool, reason: str | None) -> PauseState:
    return PauseState(paused=paused, reason=reason, changed=status.paused != paused)


def _emit_state(state: PauseState, output: OutputFormat) -> None:
    emit(state, [_sentence(state)], output)


def _sentence(state: PauseState) -> Sentences:
    word = "paused" if state.paused else "running"
    text = word if state.changed else f"already {word}"
    return Sentences("", (f"{text}: {state.reason}" if state.paused and state.reason else text,))
