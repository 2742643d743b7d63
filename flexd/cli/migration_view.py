"""Text of the history of migrations, and of aborts."""

from __future__ import annotations

from flexd.api.abort import AbortPreview, AbortResult
from flexd.api.migration import ActionEntry, MigrationDetail, MigrationEntry, MigrationList, TransitionReport
from flexd.cli.blocks import Block, Facts, Sentences, Table
from flexd.cli.status_view import migration_facts
from flexd.core import units

_NUMBERS = frozenset(("rows", "bytes", "took"))
_SPARE = ("who", "bytes", "took")
_TRANSITION_NUMBERS = frozenset(("pushed", "applied", "version"))


def history_blocks(history: MigrationList, state: str | None = None) -> list[Block]:
    """``state``: the filter that the list was requested with."""
    blocks: list[Block] = []
    if history.migrations:
        columns = ("when", "migration", "who", "state", "rows", "bytes", "took", "reason")
        blocks.append(Table("", columns, tuple(_row(entry) for entry in history.migrations), _NUMBERS, _SPARE))
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


def _row(entry: MigrationEntry) -> tuple[str, ...]:
    return (
        units.when(entry.created_unix_seconds),
        entry.migration_id,
        entry.who or units.UNKNOWN,
        entry.state,
        _of(entry.rows_applied, entry.rows),
        units.size(entry.bytes),
        units.age(entry.seconds),
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
