"""The sketches of all tables of a job: the kind and precision of every table's counters are chosen within one memory
budget, accesses are counted here, and profiles read."""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flexd.core.arrays import Arrays, Float64Array, Int32Array, Int64Array, RowArray
from flexd.core.errors import SketchError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.core.tap_counts import TapCounts
from flexd.sketch import count_min_table, dense_table
from flexd.sketch.coaccess import MIN_BYTES, CoAccess, CoAccessSample
from flexd.sketch.count_min_table import FAILURE_PROBABILITY, MAX_LOG2_WIDTH, MIN_LOG2_WIDTH, CountMinTable, error_share
from flexd.sketch.decay import ForwardDecay
from flexd.sketch.dense_table import DenseTable
from flexd.sketch.id_stream import IdStream, hashed_rows
from flexd.sketch.logarithmic_table import LogTable, packed_bytes, relative_error
from flexd.sketch.profile import Profile, TableProfile
from flexd.sketch.table_sketch import AccessSample, Kind, SketchSettings, TableChoice, TableSketch
from flexd.sketch.touch_counts import TableTouches, capacity

LOG_BITS = (3, 4, 8)
_MAX_LOG_SAMPLE = 65_536


def choose(
    tables: Sequence[TableSpec], memory_bytes: int, max_hot_rows: int, *, logarithmic: bool = True
) -> tuple[TableChoice, ...]:
    """Give every row a counter as far as memory allows, then exact ones, then more precise ones; small tables first.

    1. Tables get 3 bits per row (if ``logarithmic``).
    2. Tables that have a counter for every row get exact counters.
    3. Tables without exact counters get 4 bits per row, then 8.
    4. Tables without a counter for every row share the remaining memory as count-mins in proportion to their rows. A
       count-min is at least 2^8 wide and never larger than the dense counter it replaces.
    5. The memory that remains enlarges the samples of logarithmic tables.

    Raises:
        SketchError: the smallest choice for every table does not fit.
    """
    chosen = [_smallest(table, max_hot_rows, logarithmic=logarithmic) for table in tables]
    smallest = sum(choice.bytes for choice in chosen)
    if smallest > memory_bytes:
        raise SketchError(
            f"{len(tables)} tables cannot be counted in {memory_bytes} bytes",
            remedy=f"give sketch.memory_bytes at least {smallest}",
        )
    left = memory_bytes - smallest
    ascending = sorted(range(len(tables)), key=lambda i: (tables[i].rows, i))

    def upgrade(i: int, choice: TableChoice) -> bool:
        nonlocal left
        more = choice.bytes - chosen[i].bytes
        if more > left:
            return False
        left -= more
        chosen[i] = choice
        return True

    def upgrade_all(bits: int) -> None:
        """Upgrade tables in ascending order until memory ends, except those that have as many bits already."""
        for i in ascending:
            as_good = chosen[i].kind == "dense" or chosen[i].counter_bits >= bits
            if not as_good and not upgrade(i, _logarithmic(tables[i], bits, max_hot_rows)):
                return

    if logarithmic:
        upgrade_all(LOG_BITS[0])
    for i in ascending:
        if chosen[i].kind != "dense" and not upgrade(i, _dense(tables[i], max_hot_rows)):
            break
    if logarithmic:
        for bits in LOG_BITS[1:]:
            upgrade_all(bits)
    # Widen the table with the most rows per cell next, until nothing more fits.
    growing = {i for i in ascending if chosen[i].kind == "count_min"}
    while growing:
        i = max(growing, key=lambda i: (tables[i].rows >> chosen[i].log2_width, i))
        wider = _count_min(tables[i], chosen[i].log2_width + 1, max_hot_rows)
        most = _dense(tables[i], max_hot_rows).bytes
        if wider.log2_width > MAX_LOG2_WIDTH or wider.bytes > most or not upgrade(i, wider):
            growing.remove(i)
    sketched_rows = sum(tables[i].rows for i in ascending if chosen[i].kind == "logarithmic")
    for i, choice in enumerate(chosen):
        if choice.kind == "logarithmic":
            more = int(left * tables[i].rows / sketched_rows) // AccessSample.bytes_of(1)
            more = min(more, _MAX_LOG_SAMPLE - choice.sampled_accesses)
            size = choice.bytes + AccessSample.bytes_of(more)
            chosen[i] = replace(choice, sampled_accesses=choice.sampled_accesses + more, bytes=size)
    return tuple(chosen)


def _smallest(table: TableSpec, max_hot_rows: int, *, logarithmic: bool) -> TableChoice:
    least = _count_min(table, MIN_LOG2_WIDTH, max_hot_rows)
    if logarithmic:
        least = min(least, _logarithmic(table, LOG_BITS[0], max_hot_rows), key=lambda choice: choice.bytes)
    return min(_dense(table, max_hot_rows), least, key=lambda choice: choice.bytes)


def _dense(table: TableSpec, max_hot_rows: int) -> TableChoice:
    sampled = min(16_384, max(256, table.rows // 128))
    size = dense_table.bytes_of(table.rows) + AccessSample.bytes_of(sampled)
    return TableChoice(table.name, "dense", size, 0.0, 0.0, 0, min(max_hot_rows, table.rows), sampled)


def _count_min(table: TableSpec, log2_width: int, max_hot_rows: int) -> TableChoice:
    hot_rows = max(1, min(max_hot_rows, (1 << log2_width) // 4, table.rows))
    sampled = min(65_536, max(1024, (1 << log2_width) // 16))
    size = count_min_table.bytes_of(log2_width, hot_rows) + AccessSample.bytes_of(sampled)
    return TableChoice(
        table.name, "count_min", size, error_share(log2_width), FAILURE_PROBABILITY, log2_width, hot_rows, sampled
    )


def _logarithmic(table: TableSpec, bits: int, max_hot_rows: int) -> TableChoice:
    sampled = min(_MAX_LOG_SAMPLE, max(1, table.rows // 4096))
    size = packed_bytes(table.rows, bits) + AccessSample.bytes_of(sampled)
    hot_rows = min(max_hot_rows, table.rows)
    return TableChoice(
        table.name, "logarithmic", size, 0.0, 0.0, 0, hot_rows, sampled, bits, relative_error(bits)
    )  # fmt: skip


STATE_FORMAT = 6
KINDS: dict[Kind, type[TableSketch]] = {"dense": DenseTable, "logarithmic": LogTable, "count_min": CountMinTable}


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


@dataclass
class _Table:
    index: int
    spec: TableSpec
    choice: TableChoice
    sketch: TableSketch
    touches: TableTouches


class SketchSet:
    """Counters of every table within one memory budget, and the event-time clock by which they decay.

    One thread writes, holding ``lock`` for one message at a time; any thread may read.

    Attributes:
        lock: the readers below take it; ``ingest``, ``ingest_tap`` and ``state`` do not.
        id_streams: tables of unbounded ids by name, whose ids are counted; not saved. Their accesses count for rows by
            hash, so that an exchange can be priced; they say nothing of the rows that the ids have.
        damage: what interrupted a message, so that the counters hold an unknown part of it and must not be saved; None
            while they can be trusted.

    Args:
        key_tables: the tables of the key space, in its order.

    Raises:
        ConfigError: no tables, or two of the same name.
        SketchError: impossible settings, or more tables than the memory can hold at all.
    """

    def __init__(self, key_tables: Sequence[TableSpec], settings: SketchSettings | None = None) -> None:
        settings = settings or SketchSettings()
        specs = KeySpace(key_tables).tables
        self.settings = settings
        self.lock = threading.Lock()
        self.damage: BaseException | None = None
        self.id_streams: dict[str, IdStream] = {}
        self._decay = ForwardDecay(settings.half_life_seconds, settings.max_future_seconds, settings.late_after_seconds)
        choices = choose(specs, settings.memory_bytes, settings.max_hot_rows, logarithmic=settings.logarithmic)
        self._tables = {
            spec.name: _Table(
                index, spec, choice, KINDS[choice.kind](spec, choice, index),
                TableTouches(spec.rows, capacity(spec.rows, len(specs), settings.memory_bytes), len(specs)),
            )
            for index, (spec, choice) in enumerate(zip(specs, choices, strict=True))
        }  # fmt: skip
        # The sample of rows that occur together; None if none is kept.
        self.coaccess_sample = (
            CoAccessSample([spec.rows for spec in specs], settings.coaccess_memory_bytes, settings.half_life_seconds)
            if settings.coaccess_memory_bytes
            else None
        )

    @property
    def newest_event_seconds(self) -> float:
        """NaN before the first access."""
        return self._decay.newest_seconds

    @property
    def samples(self) -> int:
        """Accesses counted, undecayed."""
        return sum(self.samples_by_table())

    def samples_by_table(self) -> tuple[int, ...]:
        """Return the accesses counted of each table, undecayed, in the order of the tables."""
        return tuple(table.sketch.samples for table in self._tables.values())

    def choices(self) -> tuple[TableChoice, ...]:
        """Return how each table is counted, in the order of the key space."""
        return tuple(table.choice for table in self._tables.values())

    def ingest(
        self,
        table: str,
        rows: RowArray,
        source_rank: int,
        event_time_seconds: float,
        sequence_lengths: Int32Array | None = None,
        arrival_seconds: float = math.inf,
        step: int | None = None,
        sample_ids: Int64Array | None = None,
        user_ids: Int64Array | None = None,
        partition: str = "",
    ) -> AccessCounts:
        """Count one batch. Its arrays are those of an ``AccessBatch``, which has checked them.

        Args:
            table: name; accesses of an unknown table are counted as such and change nothing else.
            arrival_seconds: as in ``ForwardDecay.admit``.
            partition: of the stream, where a rank's batches are in the order of their steps.

        Raises:
            SketchError: the time is not finite. Nothing is counted then.
        """
        to = self._tables.get(table)
        if to is None:
            return AccessCounts(unknown_table=len(rows))
        step_of_touches = step if self.settings.share >= 1 else None
        if not len(rows):
            if step_of_touches is not None and not math.isnan(self._decay.newest_seconds):
                # The rank looked nothing up: without this entry its step would never be complete.
                to.touches.add(rows, source_rank, step_of_touches, self._decay.newest_seconds, self._decay, partition)
            return AccessCounts()
        time, late, clamped = self._decay.admit(event_time_seconds, arrival_seconds)
        ids = rows if rows.flags.c_contiguous else rows.copy()
        if (stream := self.id_streams.get(table)) is not None:
            stream.add(ids, time)
            ids = hashed_rows(ids, stream.rows)
        negative, outside = to.sketch.add(ids, source_rank, time, self._decay)
        if sequence_lengths is not None and self.coaccess_sample is not None:
            self.coaccess_sample.add(to.index, ids, sequence_lengths, source_rank, time, step, sample_ids, user_ids)
        if source_rank >= 0:  # accesses of unknown ranks are no batches of a training
            to.touches.add(ids, source_rank, step_of_touches, time, self._decay, partition)
        return _access_counts(len(rows) - negative - outside, negative, outside, late, clamped)

    def ingest_tap(self, counts: TapCounts, arrival_seconds: float = math.inf) -> AccessCounts:
        """Count what a rank's tap has counted by row, and the touches of its sampled passes.

        Exact tables end up equal, bit by bit, to the same accesses given to ``ingest``. In a count-min, estimates are
        never too low, because rows are added conservatively. In logarithmic counters they are right on average.

        Raises:
            SketchError: the event time is not finite.
        """
        rank, sampled, found = counts.source_rank, counts.sampled, AccessCounts()
        for table in counts.tables:
            to, accesses = self._tables.get(table.table), table.accesses
            if to is None:
                found += AccessCounts(unknown_table=accesses)
            elif accesses:
                time, late, clamped = self._decay.admit(counts.event_time_seconds, arrival_seconds)
                # Seeded by the message: counted again after a crash, it gives the same sample.
                random = np.random.default_rng([rank, int(np.float64(counts.event_time_seconds).view(np.uint64))])
                outside = to.sketch.add_counted(table.rows, table.counts, rank, time, self._decay, random)
                found += _access_counts(accesses - outside, 0, outside, late, clamped)
        for at, name in enumerate(sampled.tables if sampled.passes else ()):
            if name in self._tables:
                time, _, _ = self._decay.admit(counts.event_time_seconds, arrival_seconds)
                touches = self._tables[name].touches
                for each in sampled.passes:
                    touches.add_pass(each.rows[at], each.accesses[at], rank, each.number, time, self._decay)
        return found

    def limit_clock(self, now_seconds: float) -> None:
        """Apply ``ForwardDecay.limit``."""
        with self.lock:
            self._decay.limit(now_seconds)

    def set_backlog(self, backlog: bool) -> None:
        """Say whether the stream's backlog is being read: see ``TableTouches.set_backlog``."""
        with self.lock:
            for table in self._tables.values():
                table.touches.set_backlog(backlog, self._decay)

    def coaccess(self) -> CoAccess | None:
        """Return the sampled rows that occur together; None if none are sampled.

        The writer waits only while the sample is copied.
        """
        if self.coaccess_sample is None:
            return None
        with self.lock:
            copied = copy.deepcopy(self.coaccess_sample)
        return copied.read(tuple(self._tables))

    def query(self, table: str, rows: Int64Array, idle_seconds: float = 0.0) -> Float64Array:
        """Return the accesses of int64[n] rows, decayed until ``idle_seconds`` after the newest event, as float64[n].

        They are exact for dense tables, never too low for count-min, and right on average for logarithmic counters.

        Raises:
            SketchError: unknown table, or rows outside it.
        """
        of = self._table(table)
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= of.spec.rows):
            raise SketchError(f"rows outside table {table!r}", remedy=f"query rows 0 to {of.spec.rows - 1}")
        with self.lock:
            return of.sketch.query(rows, self._as_of(idle_seconds))

    def profile(
        self,
        accesses_per_step: Mapping[str, float] | float | None = None,
        generation: int = 0,
        lag_messages: int = 0,
        layout: RankLayout | None = None,
        idle_seconds: float = 0.0,
    ) -> Profile:
        """Return the profile that the planner reads. The writer waits only while one table's counters are copied.

        Args:
            accesses_per_step: of the whole job in one training step: by table (0 for tables not named), or in total,
                to be divided in proportion to the decayed accesses; None (unknown) leaves 0 everywhere.
            generation, lag_messages: copied into the profile.
            layout: present layout of the ranks, to map ranks to nodes; without it ``sources`` and ``touches`` are None.
                Touches by node and by anyone are counted from the first call with it on.
            idle_seconds: after the newest event, until which accesses decay.
        """
        with self.lock:
            decay, samples = self._as_of(idle_seconds), self.samples
        made = [self._read(table, decay, layout) for table in self._tables.values()]
        total = sum(table.weight for table in made)
        steps = [_accesses(table, total, accesses_per_step) for table in made]
        half_life = decay.half_life_seconds
        return Profile(
            tables=tuple(dataclasses.replace(t, accesses_per_step=a) for t, a in zip(made, steps, strict=True)),
            generation=generation,
            event_time_seconds=decay.newest_seconds,
            half_life_seconds=float("inf") if half_life is None else half_life,
            lag_messages=lag_messages,
            samples=samples,
        )

    def table_profile(self, table: str, layout: RankLayout | None = None, idle_seconds: float = 0.0) -> TableProfile:
        """Return one table of ``profile``, without its accesses per step.

        Raises:
            SketchError: unknown table.
        """
        of = self._table(table)
        with self.lock:
            decay = self._as_of(idle_seconds)
        return self._read(of, decay, layout)

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Return a copy of everything for ``flexd.sketch.restore``: (JSON-able description, arrays by name).

        Arrays of a table are named ``index/...``.
        """
        metas: list[dict[str, Any]] = []
        arrays: Arrays = {}
        for table in self._tables.values():
            meta, parts = table.sketch.state()
            meta["choice"] = dataclasses.asdict(table.choice)
            touches, touched = table.touches.state()
            if touches:
                meta["touches"] = touches
            metas.append(meta)
            arrays.update({f"{table.index}/{name}": array for name, array in {**parts, **touched}.items()})
        state = {
            "format": STATE_FORMAT,
            "settings": dataclasses.asdict(self.settings),
            "decay": {"newest": self._decay.newest_seconds.hex()},
            "table_list": [dataclasses.asdict(table.spec) for table in self._tables.values()],
            "sketches": metas,
        }
        if self.coaccess_sample is not None:
            state["coaccess"], words = self.coaccess_sample.state()
            arrays.update(words)
        return state, arrays

    def load(self, state: Mapping[str, Any], arrays: Arrays, kept: Mapping[str, int], *, coaccess: bool) -> None:
        """Continue from a saved state.

        Args:
            kept: index in the state of each table whose counters are loaded, by name; the others stay empty.
            coaccess: load the sample of rows that occur together, if both have one, of the same tables.

        Raises:
            SketchError: the state does not fit.
            KeyError, TypeError, ValueError: fields are missing or malformed.
        """
        self._decay.newest_seconds = float.fromhex(state["decay"]["newest"])
        for name, index in kept.items():
            prefix = f"{index}/"
            parts = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
            meta = dict(state["sketches"][index])
            self._tables[name].sketch.load(meta, parts)
            if "touches" in meta:
                self._tables[name].touches.load(meta["touches"], parts)
        same_tables = state["table_list"] == [dataclasses.asdict(table.spec) for table in self._tables.values()]
        if coaccess and same_tables and self.coaccess_sample is not None and "coaccess" in state:
            self.coaccess_sample.load(dict(state["coaccess"]), arrays)

    def _table(self, name: str) -> _Table:
        found = self._tables.get(name)
        if found is None:
            raise SketchError(f"unknown table {name!r}", remedy=f"one of {', '.join(self._tables)}"[:500])
        return found

    def _as_of(self, idle_seconds: float) -> ForwardDecay:
        decay = copy.copy(self._decay)
        decay.advance(decay.newest_seconds + idle_seconds)
        return decay

    def _read(self, table: _Table, decay: ForwardDecay, layout: RankLayout | None) -> TableProfile:
        with self.lock:
            frozen = copy.deepcopy(table.sketch)
        profile = frozen.profile(decay, self.settings.max_hot_rows, layout)
        if layout is None:
            return profile
        with self.lock:
            table.touches.set_layout(layout)
            measured = table.touches.read(profile.hot_rows, decay, layout)
        return profile if measured is None else dataclasses.replace(profile, touches=measured)


def _access_counts(accepted: int, negative: int, outside: int, late: bool, clamped: bool) -> AccessCounts:
    return AccessCounts(
        accepted=accepted,
        negative_row=negative,
        row_out_of_range=outside,
        future_clamped=accepted if clamped else 0,
        late=accepted if late else 0,
    )


def _accesses(table: TableProfile, total_weight: float, given: Mapping[str, float] | float | None) -> float:
    if given is None:
        return 0.0
    if isinstance(given, Mapping):
        return float(given.get(table.table, 0.0))
    return float(given) * table.weight / total_weight if total_weight > 0 else 0.0


def warm_up(used: Collection[str] = tuple(KINDS), *, coaccess: bool = False, unbounded: bool = False) -> None:
    """Compile the kernels before the first message, which takes seconds, or little with numba's cache.

    Args:
        used: kinds of tables, as in ``TableChoice.kind``.
        coaccess: whether rows that occur together are sampled.
        unbounded: whether a table has unbounded ids.
    """
    spec, decay, accesses = TableSpec("warm-up", 64, 1), ForwardDecay(None, 0.0), np.arange(4096) % 64
    for kind in KINDS:
        if kind in used:
            table = KINDS[kind](spec, TableChoice("warm-up", kind, 0, 0.0, 0.0, 8, 8, 16, 3), 0)
            # So many that levels are rounded anew, and candidates trimmed.
            for rows in (accesses, accesses.astype(np.int32)):
                table.add(rows, 0, 0.0, decay)
            table.add_counted(np.arange(4), np.ones(4, np.int64), 0, 0.0, decay, np.random.default_rng(0))
            table.rescale(1)
            table.profile(decay, 8)
            table.load(*table.state())
    if unbounded:
        for rows in (accesses, accesses.astype(np.int32)):
            IdStream(64).add(rows, 0.0)
            hashed_rows(rows, 64)
    if coaccess:
        sample, lengths = CoAccessSample([64], MIN_BYTES, None), np.ones(4096, np.int32)
        for rows in (accesses, accesses.astype(np.int32)):
            for ids in (None, accesses):
                sample.add(0, rows, lengths, 0, 0.0, 0, ids, ids)
        sample.read(["warm-up"])
