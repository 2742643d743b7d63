"""``config show`` and ``config diff``: what is in effect, in a file and in the running daemon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from flexd.cli.exit_codes import ExitCode
from flexd.cli.options import OutputOption, SocketOption, UrlOption, connect
from flexd.cli.view import Facts, OutputFormat, Sentences, Table, emit
from flexd.config.load import load_config

app = typer.Typer(
    help="The configuration, defaults included, secrets replaced.\n\nExample: flexd config show -o yaml",
    no_args_is_help=True,
)

ABSENT = "(absent)"


@dataclass(frozen=True)
class Difference:
    """One key path whose value differs; ``ABSENT`` where a side has no such key."""

    path: str
    daemon: str
    file: str


@app.command("show")
def show(
    config: Annotated[
        Path | None, typer.Option("-c", "--config", metavar="FILE", help="Of this file, not of the running daemon.")
    ] = None,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Prints what the running daemon is configured with, or would be with FILE and the present environment.

    Example: flexd config show -o yaml
    """
    document = load_config(config).document() if config is not None else connect(url, socket).config().config
    emit(document, [effective(document)], output)


@app.command("diff")
def diff(
    config: Annotated[Path, typer.Option("-c", "--config", metavar="FILE", help="The daemon's YAML.")],
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Compares FILE, with the present environment, to what the running daemon has. Exit status 7 if they differ.

    Secrets are replaced on both sides: that one has changed is not seen.

    Example: flexd config diff -c configs/laptop.yaml
    """
    found = differences(connect(url, socket).config().config, load_config(config).document())
    rows = tuple((each.path, each.daemon, each.file) for each in found)
    shown = Table("", ("key", "daemon", "file"), rows) if rows else Sentences("", ("the same",))
    emit({"differences": [vars(each) for each in found]}, [shown], output)
    raise typer.Exit(ExitCode.FOUND if found else ExitCode.OK)


def effective(document: Mapping[str, Any]) -> Facts:
    """Every value by its key path."""
    return Facts("", tuple(flat(document).items()))


def flat(document: Mapping[str, Any]) -> dict[str, str]:
    """``{"a": {"b": [1]}}`` -> ``{"a.b[0]": "1"}``."""
    values: dict[str, str] = {}

    def walk(path: str, value: object) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                walk(f"{path}.{key}" if path else str(key), item)
        elif isinstance(value, list) and value:
            for i, item in enumerate(value):
                walk(f"{path}[{i}]", item)
        else:
            values[path] = "null" if value is None else str(value)

    walk("", dict(document))
    return values


def differences(daemon: Mapping[str, Any], file: Mapping[str, Any]) -> list[Difference]:
    """In the order of the file's keys, then those that only the daemon has."""
    here, there = flat(file), flat(daemon)
    paths = [*here, *(path for path in there if path not in here)]
    pairs = ((path, there.get(path, ABSENT), here.get(path, ABSENT)) for path in paths)
    return [Difference(path, at_daemon, in_file) for path, at_daemon, in_file in pairs if at_daemon != in_file]
