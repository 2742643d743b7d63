"""``config show``, ``config diff`` and ``reload``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from flexd.api import routes
from flexd.api.config import KeyChange, ReloadReport
from flexd.cli.blocks import Block, Facts, Sentences, Table
from flexd.cli.exit_codes import ExitCode
from flexd.cli.interactive import DryRunOption, YesOption, confirm, must_ask
from flexd.cli.options import BY_HAND, ConfigOption, OutputOption, ReasonOption, SocketOption, UrlOption, connect, who
from flexd.cli.view import OutputFormat, emit

app = typer.Typer(
    help="Show or compare configurations.\n\nDefaults are included, secrets replaced.\n\n"
    "Example: flexd config show -o yaml",
    no_args_is_help=True,
)


@app.command("show")
def show(
    config: Annotated[
        Path | None,
        typer.Option("-c", "--config", metavar="FILE", help="Show this file instead of the running daemon's."),
    ] = None,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Print the configuration of the running daemon, or of FILE.

    Variables FLEXD__SECTION__KEY of the environment are applied to FILE.

    Example: flexd config show -o yaml
    """
    from flexd.config.load import load_config

    document = load_config(config).document() if config is not None else connect(url, socket).send(routes.CONFIG).config
    emit(document, [effective(document)], output)


@app.command("diff")
def diff(
    config: ConfigOption,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Compare FILE with the configuration of the running daemon. Exit status 7 if they differ.

    Variables FLEXD__SECTION__KEY of the environment are applied to FILE. Secrets are replaced on both sides, so changed
    secrets are not found.

    Example: flexd config diff -c configs/laptop.yaml
    """
    from flexd.config.load import load_config

    running, document = connect(url, socket).send(routes.CONFIG).config, load_config(config).document()
    if not document["tables"]:  # the daemon takes them from the ranks
        document["tables"] = running["tables"]
    found = differences(running, document)
    rows = tuple((each.path, each.daemon, each.file) for each in found)
    shown = Table("", ("key", "daemon", "file"), rows) if rows else Sentences("", ("the same",))
    emit({"differences": [vars(each) for each in found]}, [shown], output)
    raise typer.Exit(ExitCode.FOUND if found else ExitCode.OK)


def reload(
    reason: ReasonOption = BY_HAND,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Make the daemon read its configuration file again.

    SIGHUP does the same. Keys that need no restart take effect at once, the others are listed as pending. A file with
    a fault changes nothing: exit status 4, with the key path.

    Example: flexd reload --yes

    Example: flexd reload --dry-run
    """
    client = connect(url, socket)
    if dry_run:
        report = client.send(routes.PREVIEW_RELOAD)
    else:
        if must_ask(yes):
            confirm(f"{reload_sentence(client.send(routes.PREVIEW_RELOAD))} Reload?", yes)
        report = client.send(routes.RELOAD, reason=reason, who=who())
    emit(report, reload_blocks(report), output)


ABSENT = "(absent)"


@dataclass(frozen=True)
class Difference:
    """One key path whose value differs; ``ABSENT`` where a side has no such key."""

    path: str
    daemon: str
    file: str


def effective(document: Mapping[str, Any]) -> Facts:
    """Return every value by its key path."""
    return Facts("", tuple(flat(document).items()))


def flat(document: Mapping[str, Any]) -> dict[str, str]:
    """Return values by key path: ``{"a": {"b": [1]}}`` -> ``{"a.b[0]": "1"}``."""
    values: dict[str, str] = {}

    def walk(path: str, value: object) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                walk(f"{path}.{key}" if path else str(key), item)
        elif isinstance(value, list) and value:
            for i, item in enumerate(value):
                walk(f"{path}[{i}]", item)
        else:
            # As YAML writes it: true, not True.
            values[path] = value if isinstance(value, str) else json.dumps(value)

    walk("", dict(document))
    return values


def differences(daemon: Mapping[str, Any], file: Mapping[str, Any]) -> list[Difference]:
    """Return the differences in the order of the file's keys, then those that only the daemon has."""
    here, there = flat(file), flat(daemon)
    paths = [*here, *(path for path in there if path not in here)]
    pairs = ((path, there.get(path, ABSENT), here.get(path, ABSENT)) for path in paths)
    return [Difference(path, at_daemon, in_file) for path, at_daemon, in_file in pairs if at_daemon != in_file]


def reload_blocks(report: ReloadReport) -> list[Block]:
    """Return the result or the preview of a reload."""
    words = ("would apply", "would wait for a restart") if report.dry_run else ("applied", "needs a restart")
    head = Facts(
        "",
        (
            ("file", report.file),
            (words[0], ", ".join(report.applied) or "nothing"),
            (words[1], ", ".join(report.pending) or "nothing"),
        ),
    )
    rows = tuple(row for change in report.changes for row in _change(change))
    return [head, Table("changes", ("key", "before", "after", "takes effect"), rows)] if rows else [head]


def reload_sentence(report: ReloadReport) -> str:
    """Return the preview of a reload as one sentence."""
    if not report.applied and not report.pending:
        return f"{report.file} equals the running configuration."
    waits = f"; {', '.join(report.pending)} would wait for a restart" if report.pending else ""
    return f"Would apply from {report.file}: {', '.join(report.applied) or 'nothing'}{waits}."


def _change(change: KeyChange) -> list[tuple[str, str, str, str]]:
    when = "after a restart" if change.needs_restart else "at once"
    found = differences({change.key: change.before}, {change.key: change.after})
    # Only values of secrets are equal on both sides: they are replaced.
    return [(each.path, each.daemon, each.file, when) for each in found] or [
        (change.key, "(a secret)", "(another)", when)
    ]
