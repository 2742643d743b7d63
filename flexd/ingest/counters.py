"""The shards of all threads read, cut, merged and frozen as one."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import SketchError
from flexd.core.keyspace import TableSpec
from flexd.core.layout import RankLayout
from flexd.ingest.message_counts import Tally
from flexd.ingest.shard import Shard
from flexd.sketch.budget import TableChoice
from flexd.sketch.profile import Profile, TableProfile
from flexd.sketch.set_types import SketchSettings
from flexd.sketch.table_set import SketchSet

MAX_THREADS = 64


def settings_of_one(settings: SketchSettings, threads: int) -> SketchSettings:
    """What each of ``threads`` sets of counters is made with, so that all together stay within ``memory_bytes``."""
    return dataclasses.replace(settings, memory_bytes=settings.memory_bytes // threads)


def empty_set(tables: Sequence[TableSpec], settings: SketchSettings, threads: int) -> SketchSet:
    """The counters of one of ``threads`` threads.

    Raises:
        SketchError, ConfigError: as ``SketchSet``.
    """
    try:
        return SketchSet.of(tables, settings_of_one(settings, threads))
    except SketchError as error:
        if threads == 1:
            raise
        raise SketchError(
            f"{error.message} (sketch.memory_bytes / ingest_threads)",
            remedy="give sketch.memory_bytes more, or use fewer ingest threads",
        ) from error


def restored_set(
    tables: Sequence[TableSpec], settings: SketchSettings, meta: Mapping[str, Any], arrays: dict[str, npt.NDArray[Any]]
) -> SketchSet:
    """Saved counters, of a process with any number of threads: how each table is counted then stays as it was.

    Raises:
        SketchError: as ``SketchSet.from_state``.
    """
    saved = meta["settings"]["memory_bytes"]
    for threads in range(1, MAX_THREADS + 1):
        shared = settings_of_one(settings, threads)
        if shared.memory_bytes == saved:
            return SketchSet.from_state(tables, shared, meta, arrays)
    return SketchSet.from_state(tables, settings, meta, arrays)


def threads_within(sketches: SketchSet, memory_bytes: int, threads: int) -> int:
    """How many sets like this one fit the memory: at least 1, at most ``threads``."""
    one = sum(choice.bytes for choice in sketches.choices())
    return max(1, min(threads, memory_bytes // one))


class Counters:
    """One view of several shards. The first holds what was restored or absorbed; counts add up over all.

    Args:
        shards: at least one; of equal tables and settings.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self.half_merged = False
        """A merge was broken off: the counters hold an unknown part of it, and must not be saved."""

    @property
    def newest_event_seconds(self) -> float:
        """NaN before the first access."""
        times = [shard.sketches.newest_event_seconds for shard in self.shards]
        return max((time for time in times if not math.isnan(time)), default=math.nan)

    def tally(self) -> Tally:
        return sum((shard.tally() for shard in self.shards), Tally())

    def choices(self) -> tuple[TableChoice, ...]:
        """How each table is counted; the bytes are those of all threads."""
        threads = len(self.shards)
        return tuple(
            dataclasses.replace(choice, bytes=choice.bytes * threads) for choice in self.shards[0].sketches.choices()
        )

    def profile(
        self,
        accesses_per_step: Mapping[str, float] | float | None,
        generation: int,
        lag_messages: int,
        layout: RankLayout | None,
        idle_seconds: float,
    ) -> Profile:
        """As ``SketchSet.profile``; every shard's writer waits only while its counters are copied or added."""
        as_of = self.newest_event_seconds + idle_seconds
        first = self.shards[0]
        if len(self.shards) == 1:
            with first.guard:
                view = first.sketches.as_of(as_of)
            return view.profile(accesses_per_step, generation, lag_messages, first.guard, layout)
        merged = self._merged().as_of(as_of)
        return merged.profile(accesses_per_step, generation, lag_messages, None, layout)

    def table_profile(self, table: str, layout: RankLayout | None, idle_seconds: float) -> TableProfile:
        """As ``SketchSet.table_profile``."""
        as_of = self.newest_event_seconds + idle_seconds
        first = self.shards[0]
        if len(self.shards) == 1:
            with first.guard:
                view = first.sketches.as_of(as_of)
            return view.table_profile(table, first.guard, layout)
        return self._merged().as_of(as_of).table_profile(table, None, layout)

    def samples_by_table(self) -> tuple[int, ...]:
        """Accesses counted of each table, undecayed, in the order of the tables."""
        parts = [shard.sketches.samples_by_table() for shard in self.shards]
        return tuple(sum(of_table) for of_table in zip(*parts, strict=True))

    def query(self, table: str, rows: npt.NDArray[np.int64], idle_seconds: float) -> npt.NDArray[np.float64]:
        """As ``SketchSet.query``."""
        as_of = self.newest_event_seconds + idle_seconds
        total = np.zeros(len(rows), dtype=np.float64)
        for shard in self.shards:
            with shard.guard:
                total += shard.sketches.as_of(as_of).query(table, rows)
        return total

    def sequence_length_quantiles(self, table: str, ranks: Sequence[float]) -> npt.NDArray[np.float64]:
        """As ``SketchSet.sequence_length_quantiles``."""
        first, *others = self.shards
        with first.guard:
            lengths = first.sketches.sequence_lengths(table)
        for shard in others:
            with shard.guard:
                lengths.merge(shard.sketches.sequence_lengths(table))
        return lengths.quantiles(ranks)

    def clock(self) -> dict[str, Any]:
        """As ``SketchSet.clock``, of the shard that has seen the newest event."""

        def newest(shard: Shard) -> float:
            time = shard.sketches.newest_event_seconds
            return -math.inf if math.isnan(time) else time

        shard = max(self.shards, key=newest)
        with shard.guard:
            return shard.sketches.clock()

    def absorb(self, sketches: SketchSet, settle: Callable[[], None]) -> None:
        """Adds counters of elsewhere, then calls ``settle`` before any other change can be seen.

        Raises:
            SketchError: of other tables or settings; nothing is added and ``settle`` is not called.
        """
        with self.shards[0].guard:
            try:
                self.shards[0].sketches.merge(sketches)
                settle()
            except SketchError:
                raise
            except BaseException:
                self.half_merged = True
                raise

    def cut(self, clock: Mapping[str, Any] | None) -> SketchSet:
        """Takes all counts out and leaves empty counters. While no message is being counted.

        Raises:
            SketchError: the clock is malformed; nothing has changed.
        """
        with self._all_guards():
            fresh = [shard.sketches.emptied(secrets.randbits(62), clock) for shard in self.shards]
            taken = [shard.sketches for shard in self.shards]
            for shard, empty in zip(self.shards, fresh, strict=True):
                shard.sketches = empty
        for other in taken[1:]:
            taken[0].merge(other)
        return taken[0]

    @contextlib.contextmanager
    def frozen(self) -> Iterator[Callable[[], tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]]]:
        """While no message is being counted: holds every reader and ``absorb`` back, and gives what makes the state
        (description, arrays) of everything counted until now, later and in any thread."""
        with self._all_guards():
            if len(self.shards) == 1:
                state = self.shards[0].sketches.state()
                yield lambda: state
            else:
                merged = self.shards[0].sketches.copy()
                for shard in self.shards[1:]:
                    merged.merge(shard.sketches)
                yield merged.state

    def _merged(self) -> SketchSet:
        first, *others = self.shards
        merged = first.sketches.copy(first.guard)
        for shard in others:
            with shard.guard:
                merged.merge(shard.sketches)
        return merged

    @contextlib.contextmanager
    def _all_guards(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for shard in self.shards:
                stack.enter_context(shard.guard)
            yield
