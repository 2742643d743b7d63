"""What is remembered of all tables of a job: their counters within one memory budget, saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from flexd.core.errors import SketchError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.sketch import budget, kinds, saved_counters, saved_state
from flexd.sketch.budget import TableChoice
from flexd.sketch.coaccess import CoAccessSample
from flexd.sketch.decay import ForwardDecay
from flexd.sketch.quantiles import KllQuantiles
from flexd.sketch.saved_state import SavedState, SavedTable
from flexd.sketch.table_sketch import Arrays, TableSketch
from flexd.sketch.touch_counts import TableTouches, capacity
from flexd.sketch.types import SketchSettings


class TableCounters:
    """Counters of every table, and the event-time clock by which they decay. Not thread-safe: the owner holds a lock.

    Args:
        key_tables: the tables of the key space, in its order.
        memory_bytes, half_life_seconds, max_future_seconds, max_hot_rows, late_after_seconds,
            logarithmic, coaccess_memory_bytes, share: as in ``SketchSettings``.

    Raises:
        ConfigError: no tables, or two of the same name.
        SketchError: impossible settings, or more tables than the memory can hold at all.
    """

    def __init__(
        self,
        key_tables: Sequence[TableSpec],
        memory_bytes: int = SketchSettings.memory_bytes,
        half_life_seconds: float | None = SketchSettings.half_life_seconds,
        max_future_seconds: float = SketchSettings.max_future_seconds,
        max_hot_rows: int = SketchSettings.max_hot_rows,
        late_after_seconds: float = SketchSettings.late_after_seconds,
        logarithmic: bool = SketchSettings.logarithmic,
        coaccess_memory_bytes: int = SketchSettings.coaccess_memory_bytes,
        share: float = SketchSettings.share,
    ) -> None:
        keyspace = KeySpace(key_tables)
        if max_hot_rows < 1:
            raise SketchError(f"max_hot_rows {max_hot_rows}", remedy="list at least one")
        settings = SketchSettings(
            memory_bytes, half_life_seconds, max_future_seconds, max_hot_rows, late_after_seconds,
            logarithmic, coaccess_memory_bytes, share,
        )  # fmt: skip
        self.settings = settings
        self.digest = keyspace.digest
        self._index = keyspace.index
        self._specs = keyspace.tables
        self._decay = ForwardDecay(settings.half_life_seconds, settings.max_future_seconds, settings.late_after_seconds)
        self._choices = budget.choose(
            self._specs, settings.memory_bytes, settings.max_hot_rows, logarithmic=settings.logarithmic
        )
        self._tables: list[TableSketch] = [
            kinds.make_table(spec, choice, seed)
            for seed, (spec, choice) in enumerate(zip(self._specs, self._choices, strict=True))
        ]
        self._lengths: dict[int, KllQuantiles] = {}
        self._touches = [
            TableTouches(spec.rows, capacity(spec.rows, len(self._specs), settings.memory_bytes), len(self._specs))
            for spec in self._specs
        ]
        self._coaccess = self._make_coaccess()

    def _make_coaccess(self) -> CoAccessSample | None:
        settings = self.settings
        if not settings.coaccess_memory_bytes:
            return None
        rows = [spec.rows for spec in self._specs]
        return CoAccessSample(rows, settings.coaccess_memory_bytes, settings.half_life_seconds)

    @classmethod
    def of(cls, key_tables: Sequence[TableSpec], settings: SketchSettings) -> Self:
        """Return an empty set. Raises the errors of the constructor."""
        return cls(
            key_tables,
            settings.memory_bytes,
            settings.half_life_seconds,
            settings.max_future_seconds,
            settings.max_hot_rows,
            settings.late_after_seconds,
            settings.logarithmic,
            settings.coaccess_memory_bytes,
            settings.share,
        )

    def choices(self) -> tuple[TableChoice, ...]:
        """Return how each table is counted, in the order of the key space."""
        return self._choices

    @property
    def table_names(self) -> tuple[str, ...]:
        """Names of the tables, in the order of the key space."""
        return tuple(spec.name for spec in self._specs)

    @property
    def nbytes(self) -> int:
        """Memory of all counters of accesses in use, within ``SketchSettings.memory_bytes``."""
        return sum(table.nbytes for table in self._tables)

    @property
    def coaccess_sample(self) -> CoAccessSample | None:
        """The sample of rows that occur together; None if none is kept."""
        return self._coaccess

    @property
    def samples(self) -> int:
        """Accesses counted, undecayed."""
        return sum(table.samples for table in self._tables)

    def samples_by_table(self) -> tuple[int, ...]:
        """Return the accesses counted of each table, undecayed, in the order of the tables."""
        return tuple(table.samples for table in self._tables)

    def set_backlog(self, backlog: bool) -> None:
        """Say whether the stream's backlog is being read: see ``TableTouches.set_backlog``."""
        for touches in self._touches:
            touches.set_backlog(backlog, self._decay)

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Return a copy of everything for ``table_restore``: (JSON-able description, arrays by name)."""
        metas, arrays = saved_counters.arrays_of(self._tables, self._lengths, self._touches)
        meta = saved_state.describe(self._specs, self._choices, self.settings, self._decay.state(), metas)
        if self._coaccess is not None:
            meta[saved_state.COACCESS], words = self._coaccess.state()
            arrays.update(words)
        return meta, arrays

    def load_coaccess(self, saved: SavedState, arrays: Arrays) -> None:
        """Load the saved sample of rows that occur together, where both have one and the half-life is the same.

        Tables are found by their names.

        Raises:
            SketchError: it is damaged.
        """
        same_decay = saved.settings.half_life_seconds == self.settings.half_life_seconds
        if self._coaccess is not None and saved.coaccess is not None and same_decay:
            names = [self._index.get(table.spec.name, -1) for table in saved.tables]
            saved_counters.load_coaccess(self._coaccess, saved.coaccess, arrays, names)

    def load_clock(self, decay: Mapping[str, Any]) -> None:
        """Replace the clock by a saved one. Raises SketchError if it is malformed."""
        saved_counters.load_clock(self._decay, decay)

    def load_table(self, index: int, saved: SavedTable, arrays: Arrays) -> None:
        """Load the saved counters of one table.

        Args:
            index: of the table in this set.

        Raises:
            SketchError: they are damaged, or do not fit.
        """
        lengths = saved_counters.load_table(self._tables[index], saved, arrays)
        saved_counters.load_touches(self._touches[index], saved, arrays)
        if lengths is not None:
            self._lengths[index] = lengths

    def _index_of(self, table: str) -> int:
        index = self._index.get(table)
        if index is None:
            raise SketchError(f"unknown table {table!r}", remedy=f"one of {', '.join(self._index)}"[:500])
        return index
