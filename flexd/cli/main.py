"""The ``flexd`` command: its groups, and how errors end it."""

from __future__ import annotations

import os
import sys
import traceback

import typer

from flexd.cli import (
    config_commands,
    control_commands,
    daemon_commands,
    demo_command,
    doctor_command,
    explain_command,
    inspect_commands,
    migration_commands,
    planning_commands,
    probe_command,
    produce_command,
    reload_command,
    simulate_command,
    table_commands,
    top_command,
)
from flexd.cli.exit_codes import MEANINGS, ExitCode, exit_code_of
from flexd.cli.watch import with_watch_interval
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
app.callback()(daemon_commands.root)
daemon_commands.add_to(app)
app.command("status")(inspect_commands.status)
app.command("top")(top_command.top)
app.command("plan")(inspect_commands.plan)
table_commands.add_to(app)
app.command("explain")(explain_command.explain)
app.command("replan")(control_commands.replan)
planning_commands.add_to(app)
migration_commands.add_to(app)
app.command("pause")(control_commands.pause)
app.command("resume")(control_commands.resume)
app.command("reload")(reload_command.reload)
app.command("demo")(demo_command.demo)
app.command("simulate")(simulate_command.simulate)
app.command("probe")(probe_command.probe)
app.command("doctor")(doctor_command.doctor)
app.command("produce")(produce_command.produce)
app.add_typer(config_commands.app, name="config")


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
        # Typer makes it an exit status of 1, and puts a wrapper in place that hides it from then on.
        if type(sys.stdout).__name__ != "PacifyFlushWrapper":
            return False
    # Python flushes once more at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True


def _run() -> None:
    try:
        app(args=with_watch_interval(sys.argv[1:]))
    except FlexdError as error:
        # One fault a line (a configuration may have several); the remedy stands on a line of its own then.
        print(f"error: {error.message}", file=sys.stderr)
        if error.remedy:
            print(f"remedy: {error.remedy}", file=sys.stderr)
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except Exception as error:
        traceback.print_exc()
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        print("remedy: this is a fault of flexd; please report it with the lines above", file=sys.stderr)
        sys.exit(ExitCode.FAILED)
