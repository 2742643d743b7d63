"""Touches of a table's frequent rows, counted from the batches of a stream and decayed like accesses.

A batch is what one rank looks up in one forward pass. Without step numbers every entry of the stream is taken for a
batch, and only the touches by a rank (u) are known. Batches of the same step number together give the touches by a
node (v) and by any rank (w) too; only steps in which every rank of the layout has a batch count for these two.

A step's batches may lie in several partitions: a step is counted when every rank and every partition has passed it.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.arrays import Arrays, Float64Array, Int64Array
from flexd.core.placement import RankLayout
from flexd.core.tap_counts import is_sampled
from flexd.sketch.decay import ForwardDecay
from flexd.sketch.profile import RowTouches

# Rows of a table that are kept when it is pruned; between two prunes it has up to twice as many.
MAX_ROWS = 262_144
# Decayed batches, and complete steps, below which nothing is said about a table.
MIN_PASSES = 8.0
# Share of the counted batches since which a row must be followed, below which nothing is said about it.
MIN_EXPOSURE = 0.25

# Accesses of all tables together up to which every batch is counted.
WHOLE_ACCESSES = 2**20
# Beyond, one step in this many is counted, the same one of all ranks; without step numbers one batch in this many.
# Sorting a batch takes 80 times as long as counting its accesses.
SAMPLED_BATCHES = 64

# A partition has no more batches of the table, because publishers have left it, after so many opened steps without.
STALE_STEPS = 128
_OVERTAKING_STEPS = 16
_ARRAYS = ("touch_row_gaps", "touch_counts", "touch_since", "touch_totals")


def capacity(rows: int, tables: int, memory_bytes: int) -> int:
    """Return the rows to keep of a table: all tables together need at most an eighth of ``memory_bytes``."""
    return max(256, min(rows, MAX_ROWS, memory_bytes // 16 // tables // 48))


@dataclass
class _OpenStep:
    """A step of which batches may still arrive.

    Attributes:
        event_time_seconds: of its newest entry.
        ranks, rows, accesses: of each entry: the rank, its ascending distinct rows (int64), and its number of look-ups.
    """

    event_time_seconds: float
    ranks: list[int] = field(default_factory=list)
    rows: list[Int64Array] = field(default_factory=list)
    accesses: list[int] = field(default_factory=list)


class TableTouches:
    """Counters of one table. Not thread-safe: the owner holds a lock.

    Counts are in units of the forward weight at ``2^exponent`` (``ForwardDecay``). A row has three: ranks, nodes and
    steps that touched it. The totals are all batches, complete steps, and accesses. A row that was pruned and comes
    back is followed from the last prune on: every touch since then is known.

    Args:
        rows: of the table; others are ignored.
        capacity: rows kept by a prune, the most frequently touched ones.
        tables: number of tables that share the limits of memory and time.
    """

    def __init__(self, rows: int, capacity: int, tables: int = 1) -> None:
        self._table_rows = rows
        self._capacity = capacity
        self._whole_accesses = WHOLE_ACCESSES // tables
        self._max_open_rows = max(2**16, 2**22 // tables)
        self._seen_accesses = self._seen_batches = 0
        self._backlog = False
        self.layout: RankLayout | None = None
        # Of the layout; 0 without one.
        self._ranks = 0
        self._forget()

    def _forget(self) -> None:
        self._exponent: int | None = None
        self._rows: Int64Array = np.empty(0, np.int64)
        self._counts: Float64Array = np.empty((3, 0))
        self._since: Float64Array = np.empty((2, 0))
        self._totals: Float64Array = np.zeros(3)
        self._floor: Float64Array = np.zeros(2)
        self._pending: list[tuple[Int64Array, Float64Array]] = []
        self._pending_rows = 0
        # In the order in which their first entries arrived.
        self._open: dict[int, _OpenStep] = {}
        # Rows of all open entries, and steps that were ever opened.
        self._open_rows = self._opened = 0
        self._follow_anew()

    def _follow_anew(self) -> None:
        # Newest step number by rank.
        self._newest: dict[int, int] = {}
        # By partition its newest step number, and the steps that were opened when it came. A rank's batches may lie in
        # several partitions, which are read unevenly: a step is over when every rank and every partition has passed it.
        self._reached: dict[str, tuple[int, int]] = {}
        self._closed_before = 0
        self._closed: set[int] = set()
        self._passed = 0

    def set_backlog(self, backlog: bool, decay: ForwardDecay) -> None:
        """Count no step while a backlog is read, of which the first partitions may come long before the others.

        It ends after as many steps as a partition is waited for.
        """
        self._backlog = backlog
        self._close_passed(decay)

    def set_layout(self, layout: RankLayout) -> None:
        """Count nodes and complete steps of this layout; what was counted under another one is forgotten."""
        if self.layout not in (None, layout):
            self._forget()
        self.layout, self._ranks = layout, layout.world_size

    def add(
        self, rows: npt.NDArray[Any], rank: int, step: int | None, event_time_seconds: float, decay: ForwardDecay,
        partition: str = "",
    ) -> None:  # fmt: skip
        """Count one entry of the stream: the rows that a rank looked up, in the step if its number is known."""
        if 0 < self._ranks <= rank:
            return
        self._seen_accesses += len(rows)
        self._seen_batches += 1
        number = self._seen_batches if step is None else step
        if self._seen_accesses > self._whole_accesses and not is_sampled(number, SAMPLED_BATCHES):
            return
        distinct = np.sort(rows)
        inside = distinct[np.searchsorted(distinct, 0) : np.searchsorted(distinct, self._table_rows)]
        distinct = inside[np.append(inside[:1] >= 0, inside[1:] != inside[:-1])].astype(np.int64)
        if step is None:
            self._count_batch(distinct, len(inside), event_time_seconds, decay)
        else:
            self._add_to_step(distinct, len(inside), rank, step, event_time_seconds, decay)
            forward = step > self._reached.get(partition, (-1, 0))[0]
            if forward:
                self._reached[partition] = step, self._opened
            if forward or self._newest.get(rank) == step:
                self._close_passed(decay)

    def add_pass(
        self,
        distinct: Int64Array,
        accesses: int,
        rank: int,
        number: int,
        event_time_seconds: float,
        decay: ForwardDecay,
    ) -> None:
        """Count ascending distinct rows of a rank's forward pass.

        Whoever calls has sampled the passes, the same ones on all ranks, and gives those of a rank in their order: a
        number that is not above the rank's last one is of a training that was started again.
        """
        if 0 < self._ranks <= rank:
            return
        if number <= self._newest.get(rank, -1):
            self._restart(decay)
        inside = distinct[: np.searchsorted(distinct, self._table_rows)]
        if self._add_to_step(inside, accesses, rank, number, event_time_seconds, decay):
            self._close_passed(decay)

    def _restart(self, decay: ForwardDecay) -> None:
        self.flush(decay)
        self._follow_anew()

    def _add_to_step(
        self, distinct: Int64Array, accesses: int, rank: int, step: int, event_time_seconds: float, decay: ForwardDecay
    ) -> bool:
        # Add an entry to its step. Return whether the step is the newest one of the rank.
        if step < self._closed_before or step in self._closed:
            # One further behind is of a training that was started again, or of a partition that is read later.
            if step > self._closed_before - 10_000:
                # The step is closed; as a batch of its own the entry still counts for u.
                self._count_batch(distinct, accesses, event_time_seconds, decay)
                return False
            self._restart(decay)
        if step not in self._open:
            self._open[step] = _OpenStep(event_time_seconds)
            self._opened += 1
        to = self._open[step]
        to.event_time_seconds = max(to.event_time_seconds, event_time_seconds)
        to.ranks.append(rank)
        to.rows.append(distinct)
        to.accesses.append(accesses)
        self._open_rows += len(distinct)
        newest = step > self._newest.get(rank, -1)
        if newest:
            self._newest[rank] = step
        while self._open and (len(self._open) > 1024 or self._open_rows > self._max_open_rows):
            self._close_before(min(self._open) + 1, decay)
        return newest

    def flush(self, decay: ForwardDecay) -> None:
        """Close all open steps: what arrives of them later is not counted."""
        if self._open:
            self._close_before(max(self._open) + 1, decay)

    def read(self, rows: Int64Array, decay: ForwardDecay, layout: RankLayout) -> RowTouches | None:
        """Return the touches of int64[n] rows as of now; None if too little was counted."""
        if self._exponent is None or self.layout not in (None, layout):
            return None
        self._fold()
        unit = decay.unit_weight(self._exponent)
        batches, steps = self._totals[:2]
        if batches * unit < MIN_PASSES:
            return None
        # Behind the last row stands one that no table has, with the counts of a row that was never seen.
        at = np.searchsorted(self._rows, rows)
        at[np.append(self._rows, -1)[at] != rows] = len(self._rows)
        counts = np.column_stack([self._counts, np.zeros(3)])[:, at]
        since = np.column_stack([self._since, self._floor])[:, at]
        followed = np.stack([batches - since[0], steps - since[1]])
        enough = followed >= MIN_EXPOSURE * np.array([[batches], [steps]])
        enough &= followed * unit >= MIN_EXPOSURE * MIN_PASSES
        enough[1] &= steps * unit >= MIN_PASSES
        nodes = followed[1] * layout.nodes
        touches = [
            np.divide(count, passes, out=np.full(len(rows), np.nan), where=there & (passes > 0))
            for count, passes, there in zip(
                counts, (followed[0], nodes, followed[1]), (enough[0], enough[1], enough[1]), strict=True
            )
        ]
        accesses = float(self._totals[2] / batches)
        return RowTouches(layout.nodes, layout.local_ranks, touches[0], touches[1], touches[2], accesses)

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Return what ``load`` takes: (JSON-able values, arrays). Open steps are not part of it."""
        if self._exponent is None:
            return {}, {}
        self._fold()
        layout = self.layout
        meta: dict[str, Any] = {
            "exponent": self._exponent,
            "layout": None if layout is None else [layout.nodes, layout.local_ranks],
            "seen": [self._seen_accesses, self._seen_batches],
        }
        totals = np.concatenate([self._totals, self._floor])
        arrays = (np.diff(self._rows, prepend=0), self._counts, self._since, totals)
        # Whole numbers, in the smallest type that holds all.
        types = (np.min_scalar_type(int(array.max(initial=0))) for array in arrays)
        named = zip(_ARRAYS, arrays, types, strict=True)
        return meta, {name: array.astype(kind) for name, array, kind in named}

    def load(self, meta: dict[str, Any], arrays: Arrays) -> None:
        """Replace everything by what ``state`` returned, of a table of as many rows.

        Raises:
            KeyError, TypeError, ValueError: fields are missing or malformed.
        """
        gaps, counts, since, totals = (arrays[name] for name in _ARRAYS)
        layout = meta["layout"]
        self._forget()
        self.layout, self._ranks = None, 0
        if layout is not None:
            self.set_layout(RankLayout(int(layout[0]), int(layout[1])))
        self._exponent = int(meta["exponent"])
        self._seen_accesses, self._seen_batches = (int(number) for number in meta["seen"])
        self._rows = np.cumsum(gaps, dtype=np.int64)
        self._counts, self._since = counts.astype(np.float64), since.astype(np.float64)
        self._totals, self._floor = totals[:3].astype(np.float64), totals[3:].astype(np.float64)

    def _close_passed(self, decay: ForwardDecay) -> None:
        """Close whole steps that every rank and partition has passed, and others some steps later.

        Entries of one rank may overtake each other on their way into the stream.
        """
        self._backlog = self._backlog and self._opened <= STALE_STEPS
        if self._backlog or not self._newest or len(self._newest) < self._ranks:
            return
        self._reached = {name: at for name, at in self._reached.items() if self._opened - at[1] <= STALE_STEPS}
        passed = min([*self._newest.values(), *(step for step, _ in self._reached.values())])
        if passed <= self._passed:
            return
        self._passed = passed
        if passed - _OVERTAKING_STEPS > self._closed_before:
            self._close_before(passed - _OVERTAKING_STEPS, decay)
        for number in sorted(step for step in self._open if step < passed):
            if len(set(self._open[number].ranks)) == self._ranks:
                self._close(number, decay)
                self._closed.add(number)

    def _close_before(self, step: int, decay: ForwardDecay) -> None:
        self._closed_before = max(self._closed_before, step)
        self._closed = {number for number in self._closed if number >= self._closed_before}
        for number in sorted(number for number in self._open if number < step):
            self._close(number, decay)

    def _close(self, number: int, decay: ForwardDecay) -> None:
        step, layout = self._open.pop(number), self.layout
        self._open_rows -= sum(map(len, step.rows))
        ranks = set(step.ranks)
        complete = layout is not None and len(ranks) == self._ranks
        weight = self._weight(step.event_time_seconds, decay)
        self._totals += weight * np.array([len(ranks), complete, sum(step.accesses)])
        row = np.concatenate(step.rows)
        rank = np.repeat(np.array(step.ranks, dtype=np.int64), [len(part) for part in step.rows])
        width = int(max(step.ranks)) + 1
        pair = np.unique(row * width + rank)
        row, rank = pair // width, pair % width
        starts = np.unique(row, return_index=True)[1]
        if not len(starts):
            return
        counts = np.zeros((3, len(starts)))
        counts[0] = np.diff(starts, append=len(row))
        if complete and layout is not None:
            node = row * layout.nodes + rank // layout.local_ranks
            counts[1] = np.add.reduceat(np.append(True, node[1:] != node[:-1]), starts, dtype=np.float64)
            counts[2] = 1.0
        self._append(row[starts], weight * counts)

    def _count_batch(self, distinct: Int64Array, accesses: int, time: float, decay: ForwardDecay) -> None:
        weight = self._weight(time, decay)
        self._totals += weight * np.array([1, 0, accesses])
        counts = np.zeros((3, len(distinct)))
        counts[0] = weight
        self._append(distinct, counts)

    def _append(self, rows: Int64Array, counts: Float64Array) -> None:
        self._pending.append((rows, counts))
        self._pending_rows += len(rows)
        if self._pending_rows > 65_536 + 2 * len(self._rows):
            self._fold()
            self._prune()

    def _weight(self, time: float, decay: ForwardDecay) -> float:
        # Return the whole units of a batch of this time, and choose or raise the exponent for it.
        exponent = decay.unit_exponent(time, 16)
        if self._exponent is None:
            self._exponent = exponent
        elif exponent >= self._exponent + 8:
            self._fold()
            factor = math.ldexp(1.0, max(self._exponent - exponent, -1000))
            for values in (self._counts, self._since, self._totals, self._floor):
                # Whole units, as every counter has: they are saved in as few bytes as they need.
                np.rint(values * factor, out=values)
            self._exponent = exponent
        return float(decay.units(time, self._exponent))

    def _fold(self) -> None:
        if not self._pending:
            return
        new = np.concatenate([rows for rows, _ in self._pending])
        added = np.concatenate([counts for _, counts in self._pending], axis=1)
        self._pending, self._pending_rows = [], 0
        rows = np.union1d(self._rows, new)
        counts, since = np.zeros((3, len(rows))), np.repeat(self._floor[:, None], len(rows), axis=1)
        at = np.searchsorted(rows, self._rows)
        counts[:, at], since[:, at] = self._counts, self._since
        at = np.searchsorted(rows, new)
        for mine, more in zip(counts, added, strict=True):
            mine += np.bincount(at, weights=more, minlength=len(rows))
        self._rows, self._counts, self._since = rows, counts, since

    def _prune(self) -> None:
        if len(self._rows) <= 2 * self._capacity:
            return
        keep = np.sort(np.argpartition(-self._counts[0], self._capacity)[: self._capacity])
        self._rows, self._counts, self._since = self._rows[keep], self._counts[:, keep], self._since[:, keep]
        self._floor = self._totals[:2].copy()
