"""The sketches of all tables of a job: accesses are counted here, and profiles read."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import SketchError
from flexd.core.layout import RankLayout
from flexd.core.tap_counts import TableCounts, TapCounts
from flexd.sketch.coaccess import CoAccess
from flexd.sketch.decay import Admission, ForwardDecay, check_event_time
from flexd.sketch.profile import Profile, TableProfile
from flexd.sketch.quantiles import KllQuantiles, check_values
from flexd.sketch.table_counters import TableCounters
from flexd.sketch.table_sketch import TableSketch
from flexd.sketch.touch_counts import TableTouches
from flexd.sketch.types import AccessCounts

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

_ROW_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


class SketchSet(TableCounters):
    """Counters of every table over one event-time clock. Not thread-safe: the owner holds a lock.

    Args and errors as of ``TableCounters``.
    """

    @property
    def newest_event_seconds(self) -> float:
        """NaN before the first access."""
        return self._decay.newest_seconds

    def ingest(
        self,
        table: str,
        rows: npt.NDArray[np.integer[Any]],
        source_rank: int,
        event_time_seconds: float,
        sequence_lengths: npt.NDArray[np.integer[Any]] | None = None,
        arrival_seconds: float = math.inf,
        step: int | None = None,
        sample_ids: Int64Array | None = None,
        user_ids: Int64Array | None = None,
        partition: str = "",
    ) -> AccessCounts:
        """Count one batch.

        Args:
            table: name; accesses of an unknown table are counted as such and change nothing else.
            rows: integer[n] row ids (int32 and int64 without a copy).
            source_rank: rank whose samples made the accesses.
            event_time_seconds: Unix time of the accesses.
            sequence_lengths: integer[s] or None.
            arrival_seconds: as in ``ForwardDecay.admit``.
            step: number of the forward pass that the rank looked the rows up in, equal on all ranks; None if unknown.
            sample_ids, user_ids: int64[s] or None: the sample of each sequence, and its user. They sum up to n.
            partition: of the stream, where a rank's batches are in the order of their steps.

        Raises:
            SketchError: rows or lengths are no vectors of numbers, the time is not finite, or, where rows that occur
                together are sampled, lengths do not sum to the rows or ids of samples and users do not fit them.
                Nothing is counted then.
        """
        self._check(table, rows, event_time_seconds, sequence_lengths, sample_ids, user_ids)
        index = self._index.get(table)
        if index is None:
            return AccessCounts(unknown_table=len(rows))
        step_of_touches = step if self.settings.share >= 1 else None
        if not len(rows):
            if step_of_touches is not None and not math.isnan(self._decay.newest_seconds):
                # The rank looked nothing up: without this entry its step would never be complete.
                self._touches[index].add(
                    rows, source_rank, step_of_touches, self._decay.newest_seconds, self._decay, partition
                )
            return AccessCounts()
        admission = self._decay.admit(event_time_seconds, arrival_seconds)
        ids = rows if rows.dtype in _ROW_DTYPES else rows.astype(np.int64)
        negative, outside = self._tables[index].add(
            np.ascontiguousarray(ids), source_rank, admission.event_time_seconds, self._decay
        )
        if sequence_lengths is not None:
            self._lengths.setdefault(index, KllQuantiles()).add(sequence_lengths)
            if self._coaccess is not None:
                self._coaccess.add(
                    index, np.ascontiguousarray(ids), sequence_lengths.astype(np.int32, copy=False), source_rank,
                    admission.event_time_seconds, step, sample_ids, user_ids,
                )  # fmt: skip
        self._touches[index].add(
            ids, source_rank, step_of_touches, admission.event_time_seconds, self._decay, partition
        )  # fmt: skip
        return _access_counts(admission, len(rows) - negative - outside, negative, outside)

    def _check(
        self,
        table: str,
        rows: npt.NDArray[np.integer[Any]],
        event_time_seconds: float,
        sequence_lengths: npt.NDArray[np.integer[Any]] | None,
        sample_ids: Int64Array | None,
        user_ids: Int64Array | None,
    ) -> None:
        """Raise SketchError unless a batch can be counted; change nothing."""
        if rows.ndim != 1 or rows.dtype.kind not in "iu":
            raise SketchError(f"rows of table {table!r} are {rows.dtype}{list(rows.shape)}", remedy="give row ids [n]")
        if table not in self._index or not len(rows):
            return
        check_event_time(event_time_seconds)
        if sequence_lengths is not None:
            check_values(sequence_lengths)
            if self._coaccess is not None:
                _check_samples(table, len(rows), sequence_lengths, (sample_ids, user_ids))

    def coaccess(self) -> CoAccess | None:
        """Return the sampled rows that occur together; None if none are sampled."""
        if self._coaccess is None:
            return None
        return self._coaccess.read(self.table_names)

    def ingest_counted(
        self, counts: TableCounts, source_rank: int, event_time_seconds: float, arrival_seconds: float = math.inf
    ) -> AccessCounts:
        """Count accesses of one table that come as numbers of accesses by row, of one event time and one rank.

        Exact tables end up equal, bit by bit, to the same accesses given to ``ingest``. In a count-min, estimates are
        never too low, because rows are added conservatively. In logarithmic counters they are right on average.

        Raises:
            SketchError: the event time is not finite.
        """
        index = self._index.get(counts.table)
        if index is None:
            return AccessCounts(unknown_table=counts.accesses)
        if not counts.accesses:
            return AccessCounts()
        admission = self._decay.admit(event_time_seconds, arrival_seconds)
        # Seeded by the message: counted again after a crash, it gives the same sample.
        random = np.random.default_rng([source_rank, int(np.float64(event_time_seconds).view(np.uint64))])
        outside = self._tables[index].add_counted(
            counts.rows, counts.counts, source_rank, admission.event_time_seconds, self._decay, random
        )
        if len(counts.lengths.lengths):
            self._lengths.setdefault(index, KllQuantiles()).add_counted(counts.lengths.lengths, counts.lengths.counts)
        return _access_counts(admission, counts.accesses - outside, 0, outside)

    def ingest_passes(self, counts: TapCounts, arrival_seconds: float = math.inf) -> None:
        """Count the touches of a tap's sampled passes; their accesses are counted by ``ingest_counted``."""
        sampled = counts.sampled
        if not sampled.passes:
            return
        admission = self._decay.admit(counts.event_time_seconds, arrival_seconds)
        for at, table in enumerate(sampled.tables):
            index = self._index.get(table)
            if index is None:
                continue
            for each in sampled.passes:
                self._touches[index].add_pass(
                    each.rows[at], each.accesses[at], counts.source_rank, each.number, admission.event_time_seconds,
                    self._decay,
                )  # fmt: skip

    def advance(self, to_event_time_seconds: float) -> None:
        """Move event time on without an access, so that an idle stream decays."""
        self._decay.advance(to_event_time_seconds)

    def limit_clock(self, now_seconds: float) -> None:
        """Apply ``ForwardDecay.limit``."""
        self._decay.limit(now_seconds)

    def query(self, table: str, rows: Int64Array) -> Float64Array:
        """Return the decayed accesses of int64[n] rows as float64[n].

        They are exact for dense tables, never too low for count-min, and right on average for logarithmic counters.

        Raises:
            SketchError: unknown table, or rows outside it.
        """
        index = self._index_of(table)
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= self._specs[index].rows):
            raise SketchError(f"rows outside table {table!r}", remedy=f"query rows 0 to {self._specs[index].rows - 1}")
        return self._tables[index].query(rows, self._decay)

    def sequence_length_quantiles(self, table: str, ranks: Sequence[float]) -> Float64Array:
        """Return sequence lengths at normalised ranks 0-1 as float64[len(ranks)]; empty if none were counted.

        The rank error is ``KllQuantiles.rank_error``.

        Raises:
            SketchError: unknown table.
        """
        lengths = self._lengths.get(self._index_of(table))
        return np.empty(0, dtype=np.float64) if lengths is None else lengths.quantiles(ranks)

    def as_of(self, event_time_seconds: float) -> SketchSet:
        """Return a read-only view of these counters at a later event time; an earlier time or NaN changes nothing.

        The view shares the counters: nothing may write to this set while the view is read.
        """
        view = copy.copy(self)
        view._decay = copy.deepcopy(self._decay)
        view._decay.advance(event_time_seconds)
        return view

    def profile(
        self,
        accesses_per_step: Mapping[str, float] | float | None = None,
        generation: int = 0,
        lag_messages: int = 0,
        guard: AbstractContextManager[Any] | None = None,
        layout: RankLayout | None = None,
    ) -> Profile:
        """Return the profile that the planner reads.

        Args:
            accesses_per_step: of the whole job in one training step: by table (0 for tables not named), or in total,
                to be divided in proportion to the decayed accesses; None (unknown) leaves 0 everywhere.
            generation, lag_messages: copied into the profile.
            guard: a lock that is entered again for each table, and held only while that table's counters are copied;
                without it the caller keeps writers away.
            layout: present layout of the ranks, to map ranks to nodes; without it ``sources`` and ``touches`` are None.
                Touches by node and by anyone are counted from the first call with it on.
        """
        guard = guard or contextlib.nullcontext()
        with guard:
            decay, samples = copy.copy(self._decay), self.samples
        made: list[TableProfile] = []
        for sketch, touches in zip(self._tables, self._touches, strict=True):
            with guard:
                frozen = sketch.copy()
            made.append(self._with_touches(frozen, touches, decay, guard, layout))
        total = sum(table.weight for table in made)
        steps = [_accesses(table, total, accesses_per_step) for table in made]
        window = decay.newest_seconds - decay.oldest_seconds
        half_life = decay.half_life_seconds
        return Profile(
            tables=tuple(dataclasses.replace(t, accesses_per_step=a) for t, a in zip(made, steps, strict=True)),
            generation=generation,
            window_seconds=window if samples else 0.0,
            event_time_seconds=decay.newest_seconds,
            half_life_seconds=float("inf") if half_life is None else half_life,
            lag_messages=lag_messages,
            samples=samples,
        )

    def table_profile(
        self, table: str, guard: AbstractContextManager[Any] | None = None, layout: RankLayout | None = None
    ) -> TableProfile:
        """Return one table of ``profile``, without its accesses a step.

        Raises:
            SketchError: unknown table.
        """
        index = self._index_of(table)
        guard = guard or contextlib.nullcontext()
        with guard:
            decay, frozen = copy.copy(self._decay), self._tables[index].copy()
        return self._with_touches(frozen, self._touches[index], decay, guard, layout)

    def _with_touches(
        self,
        frozen: TableSketch,
        touches: TableTouches,
        decay: ForwardDecay,
        guard: AbstractContextManager[Any],
        layout: RankLayout | None,
    ) -> TableProfile:
        profile = frozen.profile(decay, self.settings.max_hot_rows, layout)
        if layout is None:
            return profile
        with guard:
            touches.set_layout(layout)
            measured = touches.read(profile.hot_rows, decay, layout)
        return profile if measured is None else dataclasses.replace(profile, touches=measured)


def _check_samples(
    table: str, rows: int, lengths: npt.NDArray[np.integer[Any]], ids: Sequence[Int64Array | None]
) -> None:
    if len(lengths) and (int(lengths.min()) < 0 or int(lengths.max()) > rows):
        raise SketchError(f"lengths of table {table!r} are not those of its rows", remedy="give one length a sample")
    if int(lengths.sum(dtype=np.int64)) != rows:
        raise SketchError(f"lengths of table {table!r} do not sum to its rows", remedy="give one length a sample")
    for given in ids:
        if given is not None and (given.dtype != np.int64 or given.shape != lengths.shape):
            raise SketchError(
                f"ids of samples or users of table {table!r} are {given.dtype}{list(given.shape)}",
                remedy=f"give int64[{len(lengths)}]",
            )


def _access_counts(admission: Admission, accepted: int, negative: int, outside: int) -> AccessCounts:
    return AccessCounts(
        accepted=accepted,
        negative_row=negative,
        row_out_of_range=outside,
        future_clamped=accepted if admission.future_clamped else 0,
        late=accepted if admission.late else 0,
    )


def _accesses(table: TableProfile, total_weight: float, given: Mapping[str, float] | float | None) -> float:
    if given is None:
        return 0.0
    if isinstance(given, Mapping):
        return float(given.get(table.table, 0.0))
    return float(given) * table.weight / total_weight if total_weight > 0 else 0.0
