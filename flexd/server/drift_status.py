"""How far accesses have moved since the live plan, as the admin API tells it."""

from __future__ import annotations

from flexd.server.model import Measured, Model


class TableDriftStatus(Model):
    """Drift of one table."""

    table: str
    """Name of the table."""
    ratio: Measured = None
    """Exposed seconds of its bytes, now / at planning; null if it caused none then."""
    exposed_seconds: float = 0.0
    """Per step, now; without the collectives' latencies."""
    inter_node_bytes: float = 0.0
    """Per rank and step, now."""


class DriftStatus(Model):
    """What the live placement costs now against what it cost when it was planned."""

    ratio: Measured = None
    """Exposed seconds of a step, now / at planning: above 1 the placement has got worse; null before the first look."""
    threshold: Measured = None
    """Above it a new plan is made; null if drift makes none."""
    exposed_seconds_then: Measured = None
    """Per step, under the profile of the plan."""
    exposed_seconds: Measured = None
    """Per step, now."""
    inter_node_bytes_then: Measured = None
    """Per rank and step, under the profile of the plan."""
    inter_node_bytes: Measured = None
    """Per rank and step, now."""
    total_bytes_then: Measured = None
    """Over all links."""
    total_bytes: Measured = None
    """Over all links, now."""
    age_seconds: Measured = None
    """Since the newest look."""
    tables: tuple[TableDriftStatus, ...] = ()
    """One entry a table, in the configured order."""
