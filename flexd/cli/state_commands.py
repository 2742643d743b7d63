"""``state``: look at the saved state of a daemon, back it up, move it, or start without it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexd.cli.blocks import Block, Facts, Sentences, Table
from flexd.cli.exit_codes import ExitCode
from flexd.cli.interactive import DryRunOption, YesOption, confirm
from flexd.cli.options import ConfigOption, OutputOption, check_file
from flexd.cli.view import OutputFormat, emit
from flexd.core import units
from flexd.core.errors import ConfigError

if TYPE_CHECKING:
    from flexd.config.model import Config
    from flexd.daemon.state_admin import StateReport
    from flexd.daemon.state_archive import Manifest
    from flexd.sketch.table_outcome import TableOutcome
    from flexd.stream.offsets_in_work import PoisonOffset

app = typer.Typer(
    help="Show, export, import or reset the saved state of a daemon.\n\n"
    "These commands read the files in state.dir of FILE, not a running daemon.\n\n"
    "Example: flexd state show -c configs/laptop.yaml",
    no_args_is_help=True,
)
NamesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME]...", help="Snapshots that were quarantined.")
]


def _load(config: Path) -> Config:
    from flexd.config.tables_file import load_with_known_tables
    from flexd.core import fault_points

    fault_points.arm()
    return load_with_known_tables(config)


@app.command("show")
def show(config: ConfigOption, output: OutputOption = OutputFormat.TABLE) -> None:
    """List the snapshots, and what a start with FILE would keep of them.

    Changes nothing, and may run beside the daemon. Exit status 9 if a start would be refused.

    Example: flexd state show -c configs/laptop.yaml
    """
    loaded = _load(config)
    from flexd.daemon import state_admin

    report = state_admin.report(loaded)
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
    """Quarantine all snapshots, so that the next start counts from empty.

    By default the next start reads all that the stream still holds. Files of a newer flexd are quarantined too. Exit
    status 6 if a daemon uses the directory.

    Example: flexd state reset -c configs/laptop.yaml --yes
    """
    loaded = _load(config)
    from flexd.daemon import state_admin

    report = state_admin.report(loaded)
    accesses = report.snapshots[0].accesses if report.snapshots else 0
    words = (
        f"This quarantines {units.plural(len(report.snapshots), 'snapshot')} with {units.count(accesses)} accesses in "
        f"{report.directory}."
    )
    if dry_run:
        emit({"dry_run": True, **_document(report)}, [Sentences("", (words,))], output)
        return
    confirm(f"{words} Reset?", yes)
    directory, moved = state_admin.reset(loaded, keep_positions=keep_positions)
    emit({"directory": str(directory), "quarantined": moved}, [_named("quarantined", moved)], output)


@app.command("restore")
def restore(
    config: ConfigOption,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A snapshot that was quarantined.")],
    yes: YesOption = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Make a snapshot that was quarantined the newest one.

    The next start continues from its counters and stream positions. Exit status 6 if a daemon uses the directory.

    Example: flexd state restore -c configs/laptop.yaml snapshot-000000000012-emptied.flexd --yes
    """
    loaded = _load(config)
    from flexd.daemon import state_admin

    confirm(f"The next start continues from {name}. Restore?", yes)
    path = state_admin.restore(loaded, name)
    emit({"snapshot": str(path)}, [Facts("", (("newest snapshot", str(path)),))], output)


@app.command("discard")
def discard(
    config: ConfigOption,
    names: NamesArgument = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete all quarantined snapshots.")] = False,
    yes: YesOption = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Delete quarantined snapshots. May run beside the daemon.

    Example: flexd state discard -c configs/laptop.yaml --all --yes
    """
    if bool(names) == everything:
        raise ConfigError("give names of snapshots, or --all", remedy="`flexd state show` lists them")
    loaded = _load(config)
    from flexd.daemon import state_admin

    confirm(f"Delete {'all quarantined snapshots' if everything else ', '.join(names or [])}?", yes)
    deleted = state_admin.discard(loaded, names or [])
    emit({"deleted": deleted}, [_named("deleted", deleted)], output)


@app.command("export")
def export(
    config: ConfigOption,
    archive: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="File to write.")],
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Write the newest snapshot, the journal, the history, the decisions and the deadly offsets to one file.

    May run beside the daemon.

    Example: flexd state export -c configs/laptop.yaml backup.flexd-state
    """
    loaded = _load(config)
    check_file("ARCHIVE", archive)
    from flexd.daemon import state_archive

    _emit_manifest(state_archive.export_state(loaded, archive), archive, output)


@app.command("import")
def import_(
    config: ConfigOption,
    archive: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="File that `flexd state export` wrote.")],
    replace: Annotated[bool, typer.Option("--replace", help="Quarantine the state that state.dir has.")] = False,
    yes: YesOption = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Make the state of an archive that of state.dir.

    Refused if a daemon uses the directory (exit status 6), if it has state and --replace is not given, or if a daemon
    with FILE could not continue from the archive (exit status 9). Interrupted, it can be run again.

    Example: flexd state import -c configs/laptop.yaml backup.flexd-state --replace --yes
    """
    loaded = _load(config)
    from flexd.daemon import state_archive

    confirm(f"Import {archive} into {loaded.state.dir}?", yes)
    _emit_manifest(state_archive.import_state(loaded, archive, replace=replace), archive, output)


def _emit_manifest(manifest: Manifest, archive: Path, output: OutputFormat) -> None:
    rows = tuple((name, units.size(size), digest[:16]) for name, (size, digest) in sorted(manifest.files.items()))
    facts = Facts(
        "",
        (
            ("archive", str(archive)),
            ("job", manifest.job),
            ("written by", f"flexd {manifest.version}, {units.when(manifest.unix_seconds)}"),
        ),
    )
    files = Table("files", ("file", "size", "SHA-256"), rows, frozenset(("size",)))
    emit({"archive": str(archive), **dataclasses.asdict(manifest)}, [facts, files], output)


def _document(report: StateReport) -> dict[str, Any]:
    return {
        "directory": str(report.directory),
        "starts": report.starts,
        "problems": [*report.problems, *report.preview.refused],
        "restored_from": None if report.preview.path is None else report.preview.path.name,
        "tables": [dataclasses.asdict(outcome) for outcome in report.preview.outcomes],
        "snapshots": [dataclasses.asdict(saved) for saved in report.snapshots],
        "quarantined": [
            {"name": kept.path.name, "reason": kept.reason, "bytes": kept.bytes, "unix_seconds": kept.unix_seconds}
            for kept in report.quarantined
        ],
        "deadly_offsets": [dataclasses.asdict(offset) for offset in report.deadly_offsets],
    }


def _blocks(report: StateReport) -> list[Block]:
    facts = [("directory", str(report.directory)), ("a start", _verdict(report))]
    facts += [("problem", problem) for problem in (*report.problems, *report.preview.refused)]
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
    if report.quarantined:
        kept = tuple(
            (kept.path.name, kept.reason, units.when(kept.unix_seconds), units.size(kept.bytes))
            for kept in report.quarantined
        )
        blocks.append(Table("quarantined", ("snapshot", "reason", "written", "size"), kept, frozenset(("size",))))
    if report.deadly_offsets:
        rows = tuple(_deadly(offset) for offset in report.deadly_offsets)
        columns = ("partition", "first", "last", "deaths", "last death", "next start")
        blocks.append(Table("offsets at which the daemon died", columns, rows, frozenset(("first", "last", "deaths"))))
    return blocks


def _deadly(offset: PoisonOffset) -> tuple[str, ...]:
    from flexd.stream.offsets_in_work import DEATHS_UNTIL_SKIPPED

    action = "skips them" if offset.deaths >= DEATHS_UNTIL_SKIPPED else "reads them once more"
    return (
        offset.partition, str(offset.first), str(offset.last), str(offset.deaths), units.when(offset.died_at), action,
    )  # fmt: skip


def _outcome(outcome: TableOutcome) -> tuple[str, ...]:
    return outcome.table, outcome.outcome, units.count(outcome.accesses), outcome.detail


def _verdict(report: StateReport) -> str:
    if not report.starts:
        return "would be REFUSED: see the problems"
    if report.preview.path is None:
        return "would be empty: there are no snapshots"
    lost = sum(outcome.lost for outcome in report.preview.outcomes)
    words = f"would continue from {report.preview.path.name}"
    return f"{words}, without {units.count(lost)} accesses of tables below" if lost else words


def _named(title: str, names: list[str]) -> Block:
    return Table(title, ("file",), tuple((name,) for name in names) or (("nothing",),))
