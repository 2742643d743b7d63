"""``state``: show the saved state of a daemon, or start without it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexd.cli.blocks import Sentences
from flexd.cli.exit_codes import ExitCode
from flexd.cli.options import ConfigOption, DryRunOption, OutputOption, YesOption, confirm
from flexd.cli.render import OutputFormat, emit, present
from flexd.core import units

if TYPE_CHECKING:
    from flexd.config.model import Config

app = typer.Typer(
    help="Show or reset the saved state of a daemon.\n\n"
    "These commands read the files in state.dir of FILE, not a running daemon.\n\n"
    "Example: flexd state show -c configs/laptop.yaml",
    no_args_is_help=True,
)


def _load(config: Path) -> Config:
    from flexd.core import supervision
    from flexd.daemon.config_file import load_with_known_tables

    supervision.arm()
    return load_with_known_tables(config)


@app.command("show")
def show(config: ConfigOption, output: OutputOption = OutputFormat.TABLE) -> None:
    """List the snapshots, and what a start with FILE would keep of them.

    Changes nothing, and may run beside the daemon. Exit status 9 if a start would be refused.

    Example: flexd state show -c configs/laptop.yaml
    """
    loaded = _load(config)
    from flexd.daemon import state_directory

    report = state_directory.report(loaded)
    present(report, output, tables=True)
    raise typer.Exit(ExitCode.OK if report.starts else ExitCode.STATE_UNUSABLE)


@app.command("reset")
def reset(
    config: ConfigOption,
    keep_positions: Annotated[
        bool, typer.Option("--keep-positions", help="Count from the saved stream positions on, not from the earliest.")
    ] = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Remove the snapshots, so that the next start counts from empty.

    The newest is kept under a name that ends in .unusable; renamed back, it is used again. By default the next start
    reads all that the stream still holds. Exit status 6 if a daemon uses the directory.

    Example: flexd state reset -c configs/laptop.yaml --yes
    """
    loaded = _load(config)
    from flexd.daemon import state_directory

    report = state_directory.report(loaded)
    accesses = report.snapshots[0].accesses if report.snapshots else 0
    message = (
        f"This removes {units.plural(len(report.snapshots), 'snapshot')} with {units.count(accesses)} accesses in "
        f"{report.directory}."
    )
    if dry_run:
        emit({"dry_run": True, **report.model_dump(mode="json")}, [Sentences("", (message,))], output)
        return
    confirm(f"{message} Reset?", yes)
    present(state_directory.reset(loaded, keep_positions=keep_positions), output)
