"""The counters of the stream, and the profile that the planner reads from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from flexd.api.base import DETAIL, FiniteOrNone, Model
from flexd.api.families import gauge, gauges

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from flexd.sketch.budget import TableChoice
    from flexd.sketch.node_sources import TableSources
    from flexd.sketch.profile import Profile, TableProfile

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
    error_probability: Annotated[FiniteOrNone, DETAIL] = None
    """Probability that one row's estimate exceeds the bound; 0 for the other kinds."""
    relative_error: FiniteOrNone = None
    """Relative standard error of one row's estimate by logarithmic counters; 0 for the other kinds."""
    counter_bits: int = 0
    """Bits of each row's logarithmic counter; 0 for the other kinds."""
    width: int = 0
    """Counters in each of a count-min's rows of counters; 0 for the other kinds."""
    hot_rows: Annotated[int, DETAIL] = 0
    """Rows that can be listed one by one."""
    sampled_accesses: Annotated[int, DETAIL] = 0
    """Accesses kept to tell where they come from."""
    affinity: FiniteOrNone = None
    """Excess over chance of two accesses of a row coming from one node: 0 none, 1 if every row belongs to one node. An
    unbiased estimate: sampling noise (``affinity_error``) can make it negative. Null before a profile, or if no row was
    sampled twice."""
    affinity_error: FiniteOrNone = None
    """Standard error of the affinity."""


class ProfileStatus(Model):
    """The newest profile."""

    generation: int = 0
    """Counts the profiles made; goes on over restarts."""
    samples: int = 0
    """Accesses behind it, undecayed."""
    coverage: FiniteOrNone = None
    """Smallest share of a table's accesses that listed rows and bins explain, 0-1."""
    listed: FiniteOrNone = None
    """Share of all accesses that the listed rows explain for certain: the sum of the lower bounds of their estimates,
    0-1. Low where accesses are spread evenly, or where the counters' noise hides what is popular."""
    age_seconds: FiniteOrNone = None
    """Since it was made."""
    window_seconds: FiniteOrNone = None
    """Event time between the oldest and the newest access."""


class SketchStatus(Model):
    """All counters."""

    bytes: int = 0
    """Memory of all counters."""
    tables: tuple[TableSketchStatus, ...] = ()
    """One entry a table, in the configured order."""
    profile: ProfileStatus = ProfileStatus()
    """The newest profile."""

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of the counters and the profile."""
        for name, text, values in (
            ("flexd_sketch_bytes", "Memory of the counter of each table.", {t.table: t.bytes for t in self.tables}),
            (
                "flexd_sketch_error_bound_ratio",
                "Largest over-estimate as a share of the table's accesses; 0 for other kinds.",
                {t.table: t.error_bound for t in self.tables},
            ),
            (
                "flexd_sketch_relative_error_ratio",
                "Relative standard error of one row's estimate by logarithmic counters; 0 for other kinds.",
                {t.table: t.relative_error for t in self.tables},
            ),
            (
                "flexd_table_affinity",
                "Excess over chance of two accesses of a row coming from one node: 0 none, 1 always; an unbiased "
                "estimate, so noise can make it negative; NaN if unknown.",
                {t.table: t.affinity for t in self.tables},
            ),
        ):
            yield gauges(name, text, "table", values)
        profile = self.profile
        yield gauge("flexd_profile_age_seconds", "Since the newest profile.", profile.age_seconds)
        yield gauge("flexd_profile_coverage_ratio", "Accesses the newest profile explains, 0-1.", profile.coverage)
        yield gauge(
            "flexd_profile_listed_ratio",
            "Accesses that the listed rows of the newest profile explain for certain (lower bounds), 0-1.",
            profile.listed,
        )


def sketch_status(choices: Iterable[TableChoice], profile: Profile | None, profile_age_seconds: float) -> SketchStatus:
    """Return the counters in memory and the newest profile.

    Args:
        choices: how each table is counted.
        profile: the newest; None before the first.
    """
    tables = () if profile is None else profile.tables
    sources = {table.table: table.sources for table in tables if table.sources is not None}
    counters = tuple(_table(choice, sources.get(choice.table)) for choice in choices)
    shown = ProfileStatus()
    if profile is not None:
        # The table that is known least decides; NaN if none was accessed.
        coverage = min((table.coverage for table in profile.tables if table.weight > 0), default=None)
        shown = ProfileStatus.from_object(
            profile, coverage=coverage, listed=_listed(profile.tables), age_seconds=profile_age_seconds
        )
    return SketchStatus(bytes=sum(table.bytes for table in counters), tables=counters, profile=shown)


def _listed(tables: Iterable[TableProfile]) -> float | None:
    accessed = [table for table in tables if table.weight > 0]
    if not accessed:
        return None
    weight = sum(table.weight for table in accessed)
    return sum(table.weight * float(table.hot_lower.sum()) for table in accessed) / weight


def _table(choice: TableChoice, sources: TableSources | None) -> TableSketchStatus:
    return TableSketchStatus.from_object(
        choice,
        error_bound=choice.error_share,
        error_probability=choice.failure_probability,
        width=1 << choice.log2_width if choice.kind == "count_min" else 0,
        affinity=None if sources is None else sources.affinity,
        affinity_error=None if sources is None else sources.affinity_error,
    )
