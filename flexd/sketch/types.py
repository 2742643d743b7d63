"""Settings of a ``SketchSet``, and how each table is counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["dense", "logarithmic", "count_min"]


@dataclass(frozen=True)
class SketchSettings:
    """Settings of a ``SketchSet``. They are saved with its state, which only loads into a set of equal settings.

    Attributes:
        memory_bytes: for the counters of all tables.
        half_life_seconds: event time in which an access loses half its weight; None counts for ever.
        max_future_seconds: accesses dated further ahead of their arrival are counted at their arrival.
        max_hot_rows: rows listed individually in a profile, per table.
        late_after_seconds: accesses older than the newest event by more than this are counted as late.
        logarithmic: allow logarithmic counters for tables too large for exact ones.
        coaccess_memory_bytes: of the sample of rows that occur together, besides; 0 keeps none.
        share: share of the stream that is counted. Below 1 no step is seen whole.
    """

    memory_bytes: int = 512 * 2**20
    half_life_seconds: float | None = 3600.0
    max_future_seconds: float = 300.0
    max_hot_rows: int = 1_000_000
    late_after_seconds: float = 60.0
    logarithmic: bool = True
    coaccess_memory_bytes: int = 0
    share: float = 1.0


@dataclass(frozen=True)
class TableChoice:
    """The kind and precision of one table's counters.

    Attributes:
        table: name.
        kind: ``dense`` (exact), ``logarithmic`` (every row, right on average) or ``count_min``.
        bytes: memory of the counters.
        error_share: error of one row's estimate in a count-min, as a share of the table's accesses, exceeded with
            probability at most ``failure_probability``; 0 for the other kinds.
        failure_probability: of ``error_share``.
        log2_width: of the count-min; 0 for the other kinds.
        hot_rows: rows that can be listed individually.
        sampled_accesses: size of the sample that gives the source nodes, the tail of a count-min, and the hottest rows
            of logarithmic counters.
        counter_bits: bits of a logarithmic counter; 0 for the other kinds.
        relative_error: relative standard error of one row's estimate in logarithmic counters; 0 for the other kinds.
    """

    table: str
    kind: Kind
    bytes: int
    error_share: float
    failure_probability: float
    log2_width: int
    hot_rows: int
    sampled_accesses: int
    counter_bits: int = 0
    relative_error: float = 0.0

    def words(self) -> str:
        """Return what counters of another choice cannot be loaded into, in words."""
        if self.kind == "logarithmic":
            return f"logarithmic ({self.counter_bits} bits)"
        return "dense" if self.kind == "dense" else f"count-min (2^{self.log2_width}, {self.hot_rows} hot rows)"
