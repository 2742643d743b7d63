"""``state``: show the saved state of a daemon, or start without it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexd.cli.blocks import Block, Facts, Sentences, Table
from flexd.cli.exit_codes import ExitCode
from flexd.cli.options import ConfigOption, DryRunOption, OutputOption, YesOption, confirm
from flexd.cli.render import OutputFormat, emit
from flexd.core import units

if TYPE_CHECKING:
    from flexd.config.model import Config
    from flexd.daemon.state_directory import StateReport
    from flexd.sketch.restore import TableOutcome

app = typer.Typer(
    help="Show or reset the saved state of a daemon.\n\n"
    "These commands read the files in state.dir of FILE, not a running daemon.\n\n"
    "Example: flexd state show -c configs/laptop.yaml",
    no_args_is_help=True,
)


def _load(config: Path) -> Config:
    from flexd.core import fault_points
    from flexd.operations.known_tables import load_with_known_tables

    fault_points.arm()
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
    emit(_document(report), _blocks(report), output)
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
        emit({"dry_run": True, **_document(report)}, [Sentences("", (message,))], output)
        return
    confirm(f"{message} Reset?", yes)
    directory, moved = state_directory.reset(loaded, keep_positions=keep_positions)
    emit({"directory": str(directory), "removed": moved}, [_named("removed", moved)], output)


def _document(report: StateReport) -> dict[str, Any]:
    return {
        "directory": str(report.directory),
        "starts": report.starts,
        "problems": [*report.problems, *report.preview.problems],
        "restored_from": None if report.preview.path is None else report.preview.path.name,
        "tables": [dataclasses.asdict(outcome) for outcome in report.preview.outcomes],
        "snapshots": [dataclasses.asdict(saved) for saved in report.snapshots],
    }


def _blocks(report: StateReport) -> list[Block]:
    facts = [("directory", str(report.directory)), ("a start", _verdict(report))]
    facts += [("problem", problem) for problem in (*report.problems, *report.preview.problems)]
    blocks: list[Block] = [
        Facts("", tuple(facts)),
        Table(
            "snapshots", ("snapshot", "written", "size", "format", "accesses", "problem"),
            tuple(
                (
                    saved.name, units.when(saved.unix_seconds), units.size(saved.bytes), str(saved.format or "?"),
                    units.count(saved.accesses), saved.problem,
                )
                for saved in report.snapshots
            ) or (("none", "", "", "", "", ""),),
            frozenset(("size", "format", "accesses")),
        ),
    ]  # fmt: skip
    if report.preview.outcomes:
        rows = tuple(_outcome(outcome) for outcome in report.preview.outcomes)
        blocks.append(Table("tables", ("table", "outcome", "accesses", "detail"), rows, frozenset(("accesses",))))
    return blocks


def _outcome(outcome: TableOutcome) -> tuple[str, ...]:
    return outcome.table, outcome.outcome, units.count(outcome.accesses), outcome.detail


def _verdict(report: StateReport) -> str:
    if not report.starts:
        return "would be REFUSED: see the problems"
    if report.preview.path is None:
        return "would be empty: there are no snapshots"
    lost = sum(outcome.lost for outcome in report.preview.outcomes)
    message = f"would continue from {report.preview.path.name}"
    return f"{message}, without {units.count(lost)} accesses of tables below" if lost else message


def _named(title: str, names: list[str]) -> Block:
    return Table(title, ("file",), tuple((name,) for name in names) or (("nothing",),))
