"""The planner's input: per table the access rate, the frequency curve and the hot rows with error bounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.errors import SketchError
from flexd.sketch.node_sources import TableSources

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RowTouches:
    """Measured touches of a table's listed rows: means a forward pass, NaN where unknown.

    Attributes:
        nodes, local_ranks: the layout under which they were measured.
        per_rank: float64[h], share of the ranks that look the row up (u).
        per_node: float64[h], share of the nodes of which any rank does (v).
        anywhere: float64[h], share of the passes in which any rank does (w).
        accesses: mean look-ups of the table by a rank in the batches that were counted; None if they are those of
            the profile.
    """

    nodes: int
    local_ranks: int
    per_rank: Float64Array
    per_node: Float64Array
    anywhere: Float64Array
    accesses: float | None = None

    def __post_init__(self) -> None:
        lengths = {len(values) for values in (self.per_rank, self.per_node, self.anywhere)}
        if len(lengths) != 1 or self.nodes < 1 or self.local_ranks < 1:
            raise SketchError("touches of a profile: the arrays differ in length, or the layout is empty")


@dataclass(frozen=True)
class TableProfile:
    """The accesses of one table as shares of the table's own accesses.

    Attributes:
        table: name.
        rows: rows of the table.
        weight: decayed accesses counted (the sum over rows); 0 means that the stream has not touched the table.
        accesses_per_step: expected accesses of the whole job (all ranks) to this table in one training step.
        hot_rows: int64[h], individually listed row ids, most frequent first.
        hot_share: float64[h], estimated share of the table's accesses (``estimate / weight``).
        hot_lower, hot_upper: float64[h], bounds on the share (equal to it for exact counters).
        bin_share: float64[k], share of one row in each frequency bin of the other rows.
        bin_rows: float64[k], rows in each bin (fractional where a sketch estimates the curve).
        distinct_rows: rows with at least one access (estimate).
        coverage: share of ``weight`` that hot rows and bins together explain, 0-1.
        sources: source nodes of the accesses, or None if the layout was not known.
        touches: measured touches of the hot rows, or None if none were measured.
    """

    table: str
    rows: int
    weight: float
    accesses_per_step: float
    hot_rows: Int64Array
    hot_share: Float64Array
    hot_lower: Float64Array
    hot_upper: Float64Array
    bin_share: Float64Array
    bin_rows: Float64Array
    distinct_rows: float
    coverage: float
    sources: TableSources | None = None
    touches: RowTouches | None = None

    def __post_init__(self) -> None:
        listed = len(self.hot_rows)
        if not (len(self.hot_share) == len(self.hot_lower) == len(self.hot_upper) == listed):
            raise SketchError(f"profile of table {self.table!r}: hot row arrays differ in length")
        if self.touches is not None and len(self.touches.per_rank) != listed:
            raise SketchError(f"profile of table {self.table!r}: touches of another number of rows")
        if len(self.bin_share) != len(self.bin_rows):
            raise SketchError(f"profile of table {self.table!r}: bin arrays differ in length")


@dataclass(frozen=True)
class Profile:
    """All tables at one moment.

    Attributes:
        tables: one entry per table, in the order of the key space.
        generation: number of the profile, increasing across restarts of the daemon.
        event_time_seconds: newest event time (Unix seconds), NaN before the first access.
        half_life_seconds: of the decay; inf without decay.
        lag_messages: stream messages not yet read when the profile was made.
        samples: accesses counted, undecayed.
    """

    tables: tuple[TableProfile, ...]
    generation: int = 0
    event_time_seconds: float = float("nan")
    half_life_seconds: float = float("inf")
    lag_messages: int = 0
    samples: int = 0
