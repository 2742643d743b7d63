"""The ``flexd`` command: its subcommands, and the exit status of errors."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

import flexd
from flexd.cli import (
    advise_command,
    change_commands,
    daemon_commands,
    demo_command,
    doctor_command,
    probe_command,
    shard_command,
    show_commands,
    simulate_command,
    state_commands,
)
from flexd.cli.exit_codes import MEANINGS, ExitCode, exit_code_of
from flexd.cli.options import with_options
from flexd.core.errors import FlexdError

app = typer.Typer(
    name="flexd",
    help="Keeps the embedding rows of a running recommender training in the right places.\n\n"
    # click keeps the lines of a paragraph that begins with \b.
    "\b\nExit status:\n" + "\n".join(f"  {code:<3}  {meaning}" for code, meaning in MEANINGS.items()),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(given: bool) -> None:
    if given:
        print(f"flexd {flexd.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version of flexd.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options of ``flexd`` itself."""


app.command("run")(daemon_commands.run)
app.command("check-config")(daemon_commands.check_config)
for command in (
    show_commands.status, show_commands.get, show_commands.describe, show_commands.plan, show_commands.explain,
    change_commands.replan, change_commands.apply, change_commands.abort, change_commands.rollback,
    change_commands.throttle, change_commands.pause, change_commands.resume, change_commands.reload,
):  # fmt: skip
    app.command()(command)
app.add_typer(show_commands.affinity, name="affinity")
app.add_typer(state_commands.app, name="state")
app.command("demo")(demo_command.demo)
app.command("simulate")(with_options(simulate_command.simulate))
app.command("advise")(with_options(advise_command.advise))
app.command("shard")(with_options(shard_command.shard))
app.command("probe")(probe_command.probe)
app.command("doctor")(doctor_command.doctor)


def main() -> None:
    """Run one command and end the process with an ``ExitCode``."""
    try:
        _run()
    except SystemExit as ended:
        sys.exit(ExitCode.UNREAD if _unread() else ended.code)


def _unread() -> bool:
    """Return True if the reader of the output has closed the pipe."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    else:
        # Typer turns a closed pipe into exit status 1 and replaces stdout by a wrapper that hides it.
        if type(sys.stdout).__name__ != "PacifyFlushWrapper":
            return False
    # Python flushes stdout once more when it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True


def _run() -> None:
    try:
        app()
    except FlexdError as error:
        # A configuration may have several faults, one a line; the remedy is a line of its own.
        print(f"error: {error.message}", file=sys.stderr)
        if error.remedy:
            print(f"remedy: {error.remedy}", file=sys.stderr)
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            print("error: this command trains or measures with torch, which is not installed here", file=sys.stderr)
            print("remedy: run it where flexd is installed with torch; the daemon's image has none", file=sys.stderr)
            sys.exit(ExitCode.FAILED)
        traceback.print_exc()
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        print("remedy: this is a bug in flexd; please report it with the lines above", file=sys.stderr)
        sys.exit(ExitCode.FAILED)
