"""Options that several commands share, checks of output files, and questions and waits, on a terminal only.

A script or a pipe never waits for an answer.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from flexd.cli.client import DEFAULT_URL, SOCKET_VARIABLE, URL_VARIABLE, ExitCode
from flexd.cli.render import OutputFormat
from flexd.core.errors import ConfigError

UrlOption = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help=f"The daemon's address. [env: {URL_VARIABLE}; default: {DEFAULT_URL}]"),
]
SocketOption = Annotated[
    Path | None, typer.Option("--socket", metavar="PATH", help=f"The daemon's unix socket. [env: {SOCKET_VARIABLE}]")
]
ConfigOption = Annotated[Path, typer.Option("-c", "--config", metavar="FILE", help="The daemon's YAML file.")]
OutputOption = Annotated[OutputFormat, typer.Option("-o", "--output", help="Format of the output.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Recorded by the daemon.")]

BY_HAND = "requested by hand"


def check_file(option: str, path: Path | None) -> None:
    """Raise ConfigError, which names the option, if the file cannot be written."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written", remedy="give a file in an existing, writable folder")


YesOption = Annotated[
    bool, typer.Option("-y", "--yes", help="Do not ask for confirmation; pipes and scripts are never asked.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show the effect, and change nothing.")]


def must_ask(yes: bool) -> bool:
    """Return True on a terminal without ``--yes``."""
    return not yes and sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str, yes: bool) -> None:
    """Ask the user to confirm; on any reply but yes end the command: exit status 1, or 130 at Control-C.

    Args:
        question: text without the choices, such as ``Pause job j?``.
    """
    if not must_ask(yes):
        return
    # On stderr: stdout may be redirected to a file.
    try:
        agreed = typer.confirm(question, default=False, err=True)
    except typer.Abort as ended:
        # Raised for Control-C and for the end of the input alike.
        interrupted = isinstance(ended.__context__, KeyboardInterrupt)
        print("\nnothing was changed", file=sys.stderr)
        raise typer.Exit(ExitCode.INTERRUPTED if interrupted else ExitCode.FAILED) from ended
    if not agreed:
        print("nothing was changed", file=sys.stderr)
        raise typer.Exit(ExitCode.FAILED)


Settings = TypeVar("Settings")


def with_options(command: Callable[[Settings], None]) -> Callable[..., None]:
    """Return the function that typer makes a command of: its parameters are the fields of the dataclass that
    ``command`` takes, and of dataclasses in it, each annotated as an option."""
    kind = get_type_hints(command)[next(iter(inspect.signature(command).parameters))]
    options = list(_options(kind))

    def run(**given: Any) -> None:
        command(_filled(kind, given))

    run.__doc__ = command.__doc__
    run.__annotations__ = {option.name: option.annotation for option in options}
    setattr(run, "__signature__", inspect.Signature(options))  # noqa: B010
    return run


def _options(kind: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        if is_dataclass(hints[each.name]):
            yield from _options(hints[each.name])
        else:
            default = inspect.Parameter.empty if each.default is MISSING else each.default
            yield inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[each.name]
            )


def _filled(kind: Any, given: dict[str, Any]) -> Any:
    hints = get_type_hints(kind)
    return kind(**{name: _filled(hint, given) if is_dataclass(hint) else given[name] for name, hint in hints.items()})
