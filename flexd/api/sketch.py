"""What the daemon remembers of the stream, as the admin API tells it."""

from __future__ import annotations

from typing import Literal

from flexd.api.base import FiniteOrNone, Model

SketchKind = Literal["dense", "logarithmic", "count_min"]


class TableSketchStatus(Model):
    """The counter of one table."""

    table: str
    """Name of the table."""
    kind: SketchKind
    """``dense`` counts every row exactly, ``logarithmic`` every row in a few bits, ``count_min`` is bounded."""
    bytes: int
    """Memory of the counter."""
    error_bound: FiniteOrNone = None
    """Largest over-estimate of a count-min, as a share of the table's accesses; 0 for the other kinds."""
    error_probability: FiniteOrNone = None
    """Probability that one row's estimate exceeds the bound; 0 for the other kinds."""
    relative_error: FiniteOrNone = None
    """Relative standard error of one row's estimate by logarithmic counters; 0 for the other kinds."""
    counter_bits: int = 0
    """Of each row's logarithmic counter; 0 for the other kinds."""
    width: int = 0
    """Counters in each of a count-min's rows of counters; 0 for the other kinds."""
    hot_rows: int = 0
    """Rows that can be listed one by one."""
    sampled_accesses: int = 0
    """Accesses kept to tell where they come from."""
    affinity: FiniteOrNone = None
    """Excess over chance of two accesses of a row coming from one node: 0 none, 1 if every row belongs to one node. An
    unbiased estimate: sampling noise (``affinity_error``) can make it negative. Null before a profile, or if no row was
    sampled twice."""
    affinity_error: FiniteOrNone = None
    """Standard error of the affinity."""


class ProfileStatus(Model):
    """What the planner would read now."""

    generation: int = 0
    """Counts the profiles made; goes on over restarts."""
    samples: int = 0
    """Accesses behind it, undecayed."""
    coverage: FiniteOrNone = None
    """Smallest share of a table's accesses that listed rows and bins explain, 0-1."""
    age_seconds: FiniteOrNone = None
    """Since it was made."""
    window_seconds: FiniteOrNone = None
    """Event time between the oldest and the newest access."""


class SketchStatus(Model):
    """What the daemon remembers of the stream."""

    bytes: int = 0
    """Memory of all counters."""
    tables: tuple[TableSketchStatus, ...] = ()
    """One entry a table, in the configured order."""
    profile: ProfileStatus = ProfileStatus()
    """The newest profile."""
