"""How far accesses have moved since the live plan, as the admin API tells it."""

from __future__ import annotations

from flexd.api.base import FiniteOrNone, Model


class TableDriftStatus(Model):
    """Drift of one table."""

    table: str
    """Name of the table."""
    ratio: FiniteOrNone = None
    """Exposed seconds of its bytes, now / at planning; null if it caused none then."""
    exposed_seconds: float = 0.0
    """Per step, now; without the collectives' latencies."""
    inter_node_bytes: float = 0.0
    """Per rank and step, now."""


class DriftStatus(Model):
    """What the live placement costs now against what it cost when it was planned."""

    ratio: FiniteOrNone = None
    """Exposed seconds of a step, now / at planning: above 1 the placement has got worse; null before the first look."""
    threshold: FiniteOrNone = None
    """Above it a new plan is made; null if drift makes none."""
    exposed_seconds_then: FiniteOrNone = None
    """Per step, under the profile of the plan."""
    exposed_seconds: FiniteOrNone = None
    """Per step, now."""
    inter_node_bytes_then: FiniteOrNone = None
    """Per rank and step, under the profile of the plan."""
    inter_node_bytes: FiniteOrNone = None
    """Per rank and step, now."""
    total_bytes_then: FiniteOrNone = None
    """Over all links."""
    total_bytes: FiniteOrNone = None
    """Over all links, now."""
    age_seconds: FiniteOrNone = None
    """Since the newest look."""
    tables: tuple[TableDriftStatus, ...] = ()
    """One entry a table, in the configured order."""
