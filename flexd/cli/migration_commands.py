"""``history``, ``migrations`` and ``abort``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from flexd.api import routes
from flexd.api.abort import AbortPreview, AbortResult
from flexd.api.migration import (
    MAX_LISTED,
    ActionEntry,
    MigrationDetail,
    MigrationEntry,
    MigrationList,
    MigrationReport,
    TransitionReport,
)
from flexd.api.migration_effect import MigrationEffect
from flexd.cli.blocks import Block, Facts, Sentences, Table
from flexd.cli.exit_codes import exit_code_of_outcome
from flexd.cli.interactive import DryRunOption, YesOption, confirm, migration_progress, must_ask
from flexd.cli.options import OutputOption, SocketOption, UrlOption, connect, who
from flexd.cli.view import OutputFormat, emit
from flexd.core import units

app = typer.Typer(help="List or show migrations, also of earlier daemons.", no_args_is_help=True, rich_markup_mode=None)


class State(StrEnum):
    """The names of ``MigrationStateName``."""

    PENDING = "pending"
    PUSHING = "pushing"
    APPLYING = "applying"
    COMMITTED = "committed"
    ABORTING = "aborting"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"
    FAILED = "failed"


LimitOption = Annotated[
    int, typer.Option("-n", "--limit", metavar="N", min=1, max=MAX_LISTED, help="Show at most N migrations.")
]
StateOption = Annotated[State | None, typer.Option("--state", help="Show only migrations in this state.")]


def history(
    limit: LimitOption = 20,
    state: StateOption = None,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List the newest migrations and other actions.

    Of a migration: time, user, reason, size and state. Actions are pause, resume, throttle, reload and overridden
    gates. The history survives restarts of the daemon.

    Example: flexd history -n 5 --state aborted
    """
    answer = connect(url, socket).send(routes.MIGRATIONS, limit=limit, state=None if state is None else state.name)
    emit(answer, history_blocks(answer, None if state is None else state.value), output)


@app.command("list")
def list_command(
    limit: LimitOption = 20,
    state: StateOption = None,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List the newest migrations, as flexd history does.

    Example: flexd migrations list -n 5
    """
    history(limit, state, url, socket, output)


@app.command("show")
def show_command(
    migration_id: Annotated[str, typer.Argument(metavar="ID", help="Id in flexd history, or: latest.")],
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show one migration with all changes of its state.

    Example: flexd migrations show latest
    """
    answer = connect(url, socket).send(routes.MIGRATION, migration_id=migration_id)
    emit(answer, detail_blocks(answer), output)


def abort(
    rollback: Annotated[bool, typer.Option("--rollback", help="Restore the placement before the migration.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=0, max=3600, help="Longest wait for the end, in seconds.")
    ] = 60.0,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Recorded by the daemon.")] = "",
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Stop the running migration at its next chunk.

    Waiting migrations are not started. Automatic planning continues: use flexd pause to stop it. Exit status 0 once the
    migration has stopped (and, with --rollback, every rank has the earlier placement again), 4 if no migration runs or
    it ended otherwise, 5 at the timeout.

    Example: flexd abort --rollback --dry-run

    Example: flexd abort --rollback --reason "loss is rising" --yes
    """
    client = connect(url, socket)
    if dry_run:
        preview = client.send(routes.PREVIEW_ABORT, rollback=rollback)
        emit(preview, abort_preview_blocks(preview), output)
        return
    if must_ask(yes):
        confirm(f"{abort_sentence(client.send(routes.PREVIEW_ABORT, rollback=rollback))} Abort?", yes)
    with migration_progress(client, timeout > 0):
        result = client.send(routes.ABORT, rollback=rollback, reason=reason, wait_seconds=timeout, who=who())
    emit(result, abort_blocks(result), output)
    raise typer.Exit(exit_code_of_outcome(result.outcome))


_NUMBERS = frozenset(("rows", "bytes", "took"))
_SPARE = ("who", "verdict", "bytes", "took")
_TRANSITION_NUMBERS = frozenset(("pushed", "applied", "version"))


def history_blocks(history: MigrationList, state: str | None = None) -> list[Block]:
    """Return the list of migrations; ``state`` is its filter."""
    blocks: list[Block] = []
    if history.migrations:
        measured = any(entry.effect is not None for entry in history.migrations)
        verified = any(entry.verification is not None for entry in history.migrations)
        effects = (*(("predicted", "measured") if measured else ()), *(("verdict",) if verified else ()))
        columns = ("when", "migration", "who", "state", "rows", "bytes", "took", *effects, "reason")
        rows = tuple(_row(entry, measured=measured, verified=verified) for entry in history.migrations)
        blocks.append(Table("", columns, rows, _NUMBERS | {"predicted", "measured"}, _SPARE))
    else:
        blocks.append(
            Sentences("", ("no migration is recorded" if state is None else f"no recorded migration is {state}",))
        )
    if history.actions:
        actions = tuple(_action(each) for each in history.actions)
        blocks.append(Table("actions", ("when", "action", "who", "reason", "what"), actions))
    if history.problem:
        blocks.append(Facts("", (("problem", history.problem),)))
    return blocks


def detail_blocks(migration: MigrationDetail) -> list[Block]:
    columns = ("when", "event", "state", "pushed", "applied", "version", "reason")
    rows = tuple(_transition(each) for each in migration.transitions)
    return [_head(migration), Table("transitions", columns, rows, _TRANSITION_NUMBERS)]


def abort_blocks(result: AbortResult) -> list[Block]:
    blocks: list[Block] = [Sentences("", (f"{result.outcome.replace('_', ' ')}: {result.message}",))]
    blocks.append(Facts("migration", migration_facts(result.migration)))
    if result.rollback is not None:
        blocks.append(Facts("rollback", migration_facts(result.rollback)))
    return blocks


def abort_preview_blocks(preview: AbortPreview) -> list[Block]:
    blocks: list[Block] = [
        Sentences("", (abort_sentence(preview),)),
        Facts("migration", migration_facts(preview.migration)),
    ]
    if preview.waiting:
        blocks.append(Sentences("would not be started", preview.waiting))
    return blocks


def abort_sentence(preview: AbortPreview) -> str:
    """Return the effect of an abort as one paragraph."""
    migration = preview.migration
    if migration.state == "FAILED":
        text = f"Migration {migration.migration_id} has ended with an earlier daemon."
    elif migration.chunks_pushed:
        text = (
            f"Migration {migration.migration_id} would stop behind chunk {units.count(migration.chunks_pushed)}, with "
            f"{units.count(preview.rows_pushed)} of {units.count(migration.rows)} rows on every rank."
        )
    else:
        text = f"Migration {migration.migration_id} would stop before its first chunk."
    if preview.waiting:
        text += f" {units.count(len(preview.waiting))} behind it would not be started."
    back = preview.rollback
    if back is None:
        return text
    if back.promotions + back.demotions == 0:
        return f"{text} Nothing would be taken back yet."
    return (
        f"{text} The way back to placement version {back.to_version} would promote {units.count(back.promotions)} rows "
        f"and demote {units.count(back.demotions)}, {units.size(back.bytes)} copied."
    )


def _row(entry: MigrationEntry, *, measured: bool, verified: bool) -> tuple[str, ...]:
    effect = entry.effect or MigrationEffect()
    verdict = units.UNKNOWN if entry.verification is None else entry.verification.state
    savings = (units.seconds(effect.predicted_saving_seconds), units.seconds(effect.measured_saving_seconds))
    return (
        units.when(entry.created_unix_seconds),
        entry.migration_id,
        entry.who or units.UNKNOWN,
        entry.state,
        _of(entry.rows_applied, entry.rows),
        units.size(entry.bytes),
        units.age(entry.seconds),
        *(savings if measured else ()),
        *((verdict,) if verified else ()),
        _words(entry),
    )


def _action(each: ActionEntry) -> tuple[str, ...]:
    return (units.when(each.unix_seconds), each.kind, each.who or units.UNKNOWN, each.reason, each.detail)


def _words(entry: MigrationEntry) -> str:
    words = f"{entry.trigger}: {entry.reason}" if entry.trigger and entry.reason != entry.trigger else entry.reason
    return f"{words} ({entry.problem})" if entry.problem else words


def _of(applied: int, rows: int) -> str:
    return units.count(applied) if applied == rows else f"{units.count(applied)} of {units.count(rows)}"


def _head(migration: MigrationDetail) -> Facts:
    facts = [
        ("migration", migration.migration_id),
        ("plan", migration.plan_id + (f" after {migration.parent_plan_id}" if migration.parent_plan_id else "")),
        ("who", migration.who or units.UNKNOWN),
        ("reason", _words(migration.model_copy(update={"problem": None})) or units.UNKNOWN),
        ("state", migration.state + ("" if migration.settled else ", chunks are on their way")),
        ("rows", f"{_of(migration.rows_applied, migration.rows)} applied, {units.count(migration.rows_pushed)} pushed"),
        ("chunks", f"{units.count(migration.chunks_applied)} applied, {units.count(migration.chunks_pushed)} pushed"),
        ("bytes", f"{units.size(migration.bytes)} copied, {units.size(migration.pushed_bytes)} pushed to each rank"),
        ("versions", f"{migration.base_version} -> {migration.last_version or migration.base_version}"),
        ("took", units.age(migration.seconds)),
    ]
    if migration.effect is not None:
        facts += effect_fact(migration.effect)
    if migration.verified:
        facts.append(("verified", migration.verified))
    if migration.problem:
        facts.append(("problem", migration.problem))
    return Facts("", tuple(facts))


def _transition(each: TransitionReport) -> tuple[str, ...]:
    return (
        units.when(each.unix_seconds),
        each.event or "submitted",
        f"{each.before} -> {each.after}" if each.before else each.after,
        units.count(each.rows_pushed),
        units.count(each.rows_applied),
        units.count(each.version),
        each.reason,
    )


def migration_facts(migration: MigrationReport) -> tuple[tuple[str, str], ...]:
    facts = [
        ("id", f"{migration.migration_id} of plan {migration.plan_id}"),
        ("state", f"{migration.state}, {units.share(migration.progress)} done"),
        ("rows", f"{units.count(migration.rows_applied)} of {units.count(migration.rows)}"),
        (
            "chunks",
            f"{units.count(migration.chunks_applied)} applied, {units.count(migration.chunks_pushed)} pushed"
            # Chunks are made as they are pushed: their number is rarely known.
            + (f" of {units.count(migration.chunks)}" if migration.chunks > migration.chunks_pushed else ""),
        ),
        ("bytes", units.size(migration.bytes)),
    ]
    if migration.who:
        facts.insert(1, ("why", f"{migration.reason or migration.trigger or units.UNKNOWN} ({migration.who})"))
    if migration.last_version or migration.base_version:
        facts.append(("versions", f"{migration.base_version} -> {migration.last_version or migration.base_version}"))
    if migration.steps:
        steps = ", ".join(f"{step.name} {units.share(step.completion)}" for step in migration.steps)
        facts.append(("steps", steps))
    if migration.eta_seconds is not None:
        facts.append(("left", f"{units.age(migration.eta_seconds)} at the present rate"))
    if migration.effect is not None:
        facts += effect_fact(migration.effect)
    if migration.problem:
        facts.append(("problem", migration.problem))
    return tuple(facts)


def effect_fact(effect: MigrationEffect) -> list[tuple[str, str]]:
    """Return the predicted saving of a step beside the measured one; nothing if neither is known."""
    words = []
    if effect.predicted_saving_seconds is not None:
        words.append(f"predicted {units.seconds(effect.predicted_saving_seconds)} a step")
    if effect.measured_saving_seconds is not None and effect.before is not None and effect.after is not None:
        error = "" if effect.measured_error_seconds is None else f" +- {units.seconds(effect.measured_error_seconds)}"
        words.append(
            f"measured {units.seconds(effect.measured_saving_seconds)}{error} "
            f"({units.seconds(effect.before.mean_seconds)} before, {units.seconds(effect.after.mean_seconds)} after)"
        )
    return [("saves", ", ".join(words))] if words else []
