"""Settings of a ``SketchSet``, and counts of accesses by outcome."""

from __future__ import annotations

from dataclasses import dataclass


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
class AccessCounts:
    """Accesses of one or more batches by outcome.

    ``accepted + unknown_table + negative_row + row_out_of_range`` is the total; ``future_clamped`` and ``late`` are
    included in ``accepted``.
    """

    accepted: int = 0
    unknown_table: int = 0
    negative_row: int = 0
    row_out_of_range: int = 0
    future_clamped: int = 0
    late: int = 0

    def __add__(self, other: AccessCounts) -> AccessCounts:
        return AccessCounts(
            self.accepted + other.accepted,
            self.unknown_table + other.unknown_table,
            self.negative_row + other.negative_row,
            self.row_out_of_range + other.row_out_of_range,
            self.future_clamped + other.future_clamped,
            self.late + other.late,
        )
