"""Migrations: the running ones and their history."""

from __future__ import annotations

from typing import Literal

from flexd.api.base import FiniteOrNone, Model, Share

MAX_LISTED = 1000
MigrationStateName = Literal[
    "PENDING", "PUSHING", "APPLYING", "COMMITTED", "ABORTING", "ABORTED", "SUPERSEDED", "FAILED"
]


class MigrationStep(Model):
    """A part of a migration. Parts overlap: chunks are pipelined."""

    name: str
    """``wait``, ``push``, ``agree``, ``apply`` or ``stop``."""
    completion: Share
    """How far it has come."""


class MigrationReport(Model):
    """A migration in flight, or the newest one."""

    migration_id: str
    """Id of the migration."""
    plan_id: str
    """The plan it carries out."""
    parent_plan_id: str | None = None
    """The plan that the placement before it came from."""
    trigger: str | None = None
    """What led to it: ``interval``, ``drift``, ``topology`` or ``manual``."""
    who: str = ""
    """Who or what asked for it."""
    reason: str = ""
    """Why, in their words."""
    state: MigrationStateName
    """Where it stands."""
    progress: Share = 0.0
    """Share of its rows that every rank has applied."""
    steps: tuple[MigrationStep, ...] = ()
    """Its parts: ``wait`` for its turn, ``push``, ``agree`` and ``apply`` of its rows, ``stop`` after an abort."""
    eta_seconds: FiniteOrNone = None
    """Until every rank has applied it, at the present rate; null if that is not known."""
    rows: int = 0
    """Rows it moves."""
    rows_applied: int = 0
    """Of which on every rank."""
    chunks: int = 0
    """Chunks it is pushed in."""
    chunks_pushed: int = 0
    """Of which pushed."""
    chunks_applied: int = 0
    """Of which applied by every rank."""
    bytes: int = 0
    """Row values and optimizer state of the rows it promotes, each once."""
    bytes_applied: int = 0
    """Of which on every rank."""
    base_version: int = 0
    """Placement version that it started from."""
    last_version: int = 0
    """Highest placement version that it has pushed; 0 before its first chunk."""
    started_unix_seconds: FiniteOrNone = None
    """When it was started."""
    problem: str | None = None
    """Why it failed or is held up."""


class MigrationEntry(Model):
    """One migration of the history."""

    migration_id: str
    """Id of the migration."""
    plan_id: str
    """The plan it carried out."""
    parent_plan_id: str | None = None
    """The plan that the placement before it came from."""
    trigger: str | None = None
    """What led to it: ``interval``, ``drift``, ``topology`` or ``manual``."""
    who: str = ""
    """Who or what asked for it."""
    reason: str = ""
    """Why, in their words."""
    state: MigrationStateName
    """Where it stands, or how it ended."""
    problem: str | None = None
    """Why it ended early."""
    rows: int = 0
    """Rows that it was to move; 0 if it never started."""
    rows_pushed: int = 0
    """Of which sent to the ranks."""
    rows_applied: int = 0
    """Of which applied by every rank."""
    chunks_pushed: int = 0
    """Chunks sent to the ranks."""
    chunks_applied: int = 0
    """Of which applied by every rank."""
    bytes: int = 0
    """Row values and optimizer state of promoted rows that were applied, each once."""
    pushed_bytes: int = 0
    """Sent over the control channel to each rank."""
    base_version: int = 0
    """Placement version that it started from."""
    last_version: int = 0
    """Highest placement version that it pushed; 0 if none."""
    created_unix_seconds: FiniteOrNone = None
    """When it was asked for."""
    started_unix_seconds: FiniteOrNone = None
    """When its first chunk was made."""
    ended_unix_seconds: FiniteOrNone = None
    """When it ended."""
    seconds: FiniteOrNone = None
    """From being asked for to its end."""
    settled: bool = False
    """Whether nothing of it is on its way any more, so that rows and bytes are final."""


class TransitionReport(Model):
    """One change of a migration's state."""

    number: int
    """Counts from 0, its submission."""
    unix_seconds: FiniteOrNone = None
    """When."""
    event: str | None = None
    """What happened; null for the submission."""
    before: MigrationStateName | None = None
    """State before; null for the submission."""
    after: MigrationStateName
    """State after."""
    reason: str = ""
    """Why, if that is known."""
    rows_pushed: int = 0
    """Sent to the ranks by then."""
    rows_applied: int = 0
    """Applied by every rank by then."""
    version: int = 0
    """Highest placement version that it had pushed by then; 0 before its first chunk."""


class MigrationDetail(MigrationEntry):
    """One migration of the history, with everything that it went through."""

    transitions: tuple[TransitionReport, ...] = ()
    """In order; of very many the first and the newest are kept."""


class ActionEntry(Model):
    """Something else that was asked of the daemon."""

    unix_seconds: FiniteOrNone = None
    """When."""
    kind: str
    """``pause``, ``resume``, ``throttle``, ``reload``, or ``override`` of gates that were closed."""
    who: str = ""
    """Who asked for it."""
    reason: str = ""
    """Why, in their words."""
    detail: str = ""
    """What it came to."""


class MigrationList(Model):
    """The newest first, of each."""

    migrations: tuple[MigrationEntry, ...] = ()
    """At most as many as were asked for."""
    actions: tuple[ActionEntry, ...] = ()
    """What else was asked for, at most as many; none if migrations in one state were asked for."""
    problem: str | None = None
    """Why the newest are not in the history's file yet, if so."""
