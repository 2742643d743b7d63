"""When the daemon plans, what it waits for, and what it proposes, as the admin API tells it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flexd.api.base import FiniteOrNone, Model

TriggerName = Literal["interval", "drift", "topology", "manual"]


class GateReport(Model):
    """One thing that must be known well enough before a plan is made."""

    gate: str
    """``samples``, ``coverage``, ``window``, ``lag`` or ``sketch_error``."""
    key: str
    """Of the configuration."""
    measured: FiniteOrNone = None
    """Accesses, share, seconds, messages or share."""
    required: FiniteOrNone = None
    """The bound."""
    at_most: bool = False
    """Whether it is an upper bound."""
    open: bool = True
    """Whether a plan may be made, as far as this gate is concerned."""
    words: str = ""
    """What is wrong, if it is closed."""


class ProposalReport(Model):
    """A plan that is kept for ``flexd apply``."""

    plan_id: str
    """What ``flexd apply`` takes."""
    created_unix_seconds: FiniteOrNone = None
    """When it was made."""
    trigger: TriggerName = "manual"
    """What it was made for."""
    reason: str = ""
    """The same in words."""
    dry_run: bool = False
    """Somebody asked to see it; otherwise the daemon proposes it."""
    promotions: int = 0
    """Rows that get more copies."""
    demotions: int = 0
    """Rows that lose copies."""
    migration_bytes: int = 0
    """Row values and optimizer state that it would copy."""
    saved_seconds: FiniteOrNone = None
    """Of a step's exposed communication, by its model."""
    closed_gates: tuple[str, ...] = ()
    """It is carried out with ``--force`` only."""
    outdated: str | None = None
    """Why it cannot be carried out any more, if so."""


class ProposalList(Model):
    """The kept plans, newest first."""

    proposals: tuple[ProposalReport, ...] = ()
    """At most four dry runs and four of the daemon's own."""


class PlanningStatus(Model):
    """When the daemon plans by itself, and what holds it back."""

    auto: bool = True
    """Whether plans are carried out; otherwise they are proposed only."""
    held: str | None = None
    """Why the daemon starts no migration by itself now, if so."""
    window_open: bool = True
    """Whether the maintenance windows allow it now."""
    window_changes_unix_seconds: FiniteOrNone = None
    """When that changes next; null if it does not within two weeks."""
    waiting_for_window: str | None = None
    """The trigger that fires when the window opens."""
    refused: str | None = None
    """Why the newest try made no plan, if it did not."""
    gates: tuple[GateReport, ...] = ()
    """Of the newest profile; empty before the first."""
    triggers: dict[TriggerName, int] = Field(default_factory=dict)
    """Plans asked for since the daemon started, by what asked."""
    proposals: tuple[ProposalReport, ...] = ()
    """Kept plans, newest first."""
