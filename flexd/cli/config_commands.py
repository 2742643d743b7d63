"""``config show`` and ``config diff``: what is in effect, in a file and in the running daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexd.cli.blocks import Sentences, Table
from flexd.cli.config_view import differences, effective
from flexd.cli.exit_codes import ExitCode
from flexd.cli.options import ConfigOption, OutputOption, SocketOption, UrlOption, connect
from flexd.cli.view import OutputFormat, emit

app = typer.Typer(
    help="The configuration, defaults included, secrets replaced.\n\nExample: flexd config show -o yaml",
    no_args_is_help=True,
)


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
    from flexd.config.load import load_config

    document = load_config(config).document() if config is not None else connect(url, socket).config().config
    emit(document, [effective(document)], output)


@app.command("diff")
def diff(
    config: ConfigOption,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Compares FILE, with the present environment, to what the running daemon has. Exit status 7 if they differ.

    Secrets are replaced on both sides: that one has changed is not seen.

    Example: flexd config diff -c configs/laptop.yaml
    """
    from flexd.config.load import load_config

    found = differences(connect(url, socket).config().config, load_config(config).document())
    rows = tuple((each.path, each.daemon, each.file) for each in found)
    shown = Table("", ("key", "daemon", "file"), rows) if rows else Sentences("", ("the same",))
    emit({"differences": [vars(each) for each in found]}, [shown], output)
    raise typer.Exit(ExitCode.FOUND if found else ExitCode.OK)
