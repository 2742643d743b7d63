"""Repeat a request: a screen that renews itself on a terminal, one result after another in a pipe."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Annotated

import typer
from pydantic import BaseModel

from flexd.cli.blocks import Block
from flexd.cli.view import OutputFormat, emit, show
from flexd.core import units
from flexd.core.errors import FlexdError
from flexd.core.signal_flag import SignalFlag

WatchOption = Annotated[
    float | None,
    typer.Option("-w", "--watch", metavar="[S]", min=0.2, max=3600, help="Repeat every S seconds (default 2)."),
]
DEFAULT_INTERVAL = "2"
_WATCHED_COMMANDS = frozenset(("status", "tables", "rows", "topology"))
Answer = tuple[BaseModel, Sequence[Block]]
_CLEAR = "\x1b[H\x1b[2J\x1b[3J"


def with_watch_interval(arguments: Sequence[str]) -> list[str]:
    """Add the default interval after ``-w`` or ``--watch`` where none follows: typer has no optional values.

    Args:
        arguments: those after the program's name.
    """
    if not arguments or arguments[0] not in _WATCHED_COMMANDS:
        return list(arguments)
    completed: list[str] = []
    for at, argument in enumerate(arguments):
        completed.append(argument)
        following = arguments[at + 1] if at + 1 < len(arguments) else ""
        if argument in ("-w", "--watch") and not _is_number(following):
            completed.append(DEFAULT_INTERVAL)
    return completed


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def emit_watched(ask: Callable[[], Answer], output: OutputFormat, seconds: float | None) -> None:
    """Print the result of ``ask`` once, or every ``seconds`` until Control-C.

    On a terminal a daemon that does not answer is waited for; in a pipe that ends the command. JSON is one document a
    line then.
    """
    if seconds is None:
        emit(*ask(), output)
        return
    renewing = output is OutputFormat.TABLE and sys.stdout.isatty()
    with contextlib.suppress(KeyboardInterrupt), _interrupts() as interrupted:
        while not interrupted.is_set():
            if renewing:
                _renew(ask, seconds)
            else:
                _next(ask(), output)
            interrupted.wait(seconds)


@contextlib.contextmanager
def _interrupts() -> Iterator[SignalFlag]:
    """Yield a flag that Control-C sets, since Python swallows exceptions that are raised while an object is freed."""
    interrupted = SignalFlag()

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _renew(ask: Callable[[], Answer], seconds: float) -> None:
    problem = ""
    blocks: Sequence[Block] = ()
    try:
        _, blocks = ask()
    except FlexdError as error:
        problem = f"error: {error.message}\n"
    sys.stdout.write(f"{_CLEAR}{units.when(time.time())}, every {seconds:g} s (Control-C ends)\n\n{problem}")
    show(blocks, sys.stdout)
    sys.stdout.flush()


def _next(answer: Answer, output: OutputFormat) -> None:
    data, blocks = answer
    if output is OutputFormat.JSON:
        sys.stdout.write(json.dumps(data.model_dump(mode="json"), ensure_ascii=False) + "\n")
    else:
        emit(data, blocks, output)
        sys.stdout.write("---\n" if output is OutputFormat.YAML else "\n")
    sys.stdout.flush()
