"""RecShard's comparison: pooled tables of different skew in a fast memory that does not hold them, and after drift.

RecShard's split (which rank a table belongs to and how many of its hottest rows are in fast memory, once), and flexd's
rows at homes with cache slots, in fast memory for a quarter of the tables. Tables of a list (TorchRec's published one
with ``--tables``, otherwise one made up) with their rows and batch divided by a scale, each with a Zipf exponent of
its own. All strategies are counted on the same drawn batches: accesses to rows in slow memory, as RecShard counts
them; and distinct rows of a step read from slow memory, which is what a system needs that reads a row once per step,
however many samples use it. flexd's are those of the cache slots of each rank and dim-group, replayed: divided by the
ranks as they train, beside cache slots in proportion to rows.

Half way the popularity of the rows in half of the tables moves. Counting begins when the cache slots are warm, and
again right after the move.

Balance: the slow accesses of the busiest rank over the mean. Reading: of the slowest rank, 1,555 GB/s and 32 GB/s.

Checks, as planned and after the move: flexd reads fewer rows from slow memory than RecShard has slow accesses, and than
it would have with a row read once per step; its busiest rank is nearer to the mean.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flexd.embedding.devices import packed
from flexd.embedding.row_optimizers import SGD
from flexd.embedding.store.slow.cold_rows import FreshRows, HostRows
from flexd.embedding.store.slow.fast_memory import CACHE_SLOT_BYTES
from flexd.embedding.store.slow.tiered_rows import COUNT_BYTES, TieredRows, with_counts
from flexd.embedding.store.slow.tiered_storage import CacheSlotDivision, TieredStorage
from flexd.planner.tables.sharding import read_tables
from tools.bench.harness import Outcome, check
from tools.bench.peers.recshard import FAST_BYTES_PER_SECOND, SLOW_BYTES_PER_SECOND, split_tables
from tools.bench.peers.recshard_tables import LAYOUT, MOVED, PLANNED, Tables
from tools.bench.planning import made_up_tables

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
Figures = dict[str, Any]

FAST_SHARE, MOVED_SHARE = 0.25, 0.5
FLEXD, BY_ROWS = "flexd", "cache slots by rows"


class Static:
    """Whole tables on ranks, some rows of each in fast memory for good."""

    def __init__(self, tables: Tables, rank: Int64Array, fast_rows: Float64Array) -> None:
        number = np.diff(tables.first)
        within = np.arange(tables.first[-1]) - np.repeat(tables.first[:-1], number)
        self._slow = within >= np.repeat(np.floor(fast_rows), number)
        self._rank = np.repeat(rank, number)

    def step(self, rows: Int64Array, counts: Int64Array) -> tuple[Int64Array, Float64Array, Float64Array]:
        """Distinct rows and how often each is accessed -> (rank, accesses in slow memory, rows read there) of each."""
        slow = self._slow[rows]
        return self._rank[rows], counts * slow, slow.astype(np.float64)


class CacheSlots:
    """Rows at homes by number, in cache slots of fast memory and slow memory behind them, as ranks have them.

    Args:
        divides: ranks divide their cache slots between dim-groups as they train.
    """

    def __init__(self, tables: Tables, cache_slots: Sequence[int], *, divides: bool) -> None:
        keyspace, world = tables.keyspace, LAYOUT.world_size
        number = np.diff(tables.first)
        group = np.zeros(len(number), dtype=np.int64)
        sizes = np.zeros(len(keyspace.groups), dtype=np.int64)
        for at, dim_group in enumerate(keyspace.groups):
            group[list(dim_group.tables)] = at
            sizes[at] = int(tables.stored_bytes[dim_group.tables[0]]) + CACHE_SLOT_BYTES
        within = np.arange(tables.first[-1]) - np.repeat(tables.first[:-1], number)
        key = within + np.repeat(np.asarray(keyspace.first_key), number)
        self._group, self._rank = np.repeat(group, number), key % world
        first = np.array([dim_group.first_key for dim_group in keyspace.groups])
        self._slot = (key - np.repeat(first[group], number)) // world
        home_rows = [-(-dim_group.rows // world) for dim_group in keyspace.groups]
        self._tiers = [
            [_tier(min(count, rows), rows) for count, rows in zip(cache_slots, home_rows, strict=True)]
            for _ in range(world)
        ]  # fmt: skip
        self._divisions = [CacheSlotDivision(tiers, sizes.tolist()) for tiers in self._tiers] if divides else []

    def step(self, rows: Int64Array, counts: Int64Array) -> tuple[Int64Array, Float64Array, Float64Array]:
        """As ``Static.step``. A row that is read is in a cache slot for all its accesses of the step."""
        place = self._group[rows] * LAYOUT.world_size + self._rank[rows]
        order = np.argsort(place, kind="stable")
        missed = np.zeros(len(rows))
        for at in np.split(order, np.flatnonzero(np.diff(place[order])) + 1):
            if len(at):
                group, rank = divmod(int(place[at[0]]), LAYOUT.world_size)
                tier, slots = self._tiers[rank][group], self._slot[rows[at]]
                for _ in tier.visit(torch.from_numpy(slots), changes=True, counts=True):
                    pass
                missed[at] = np.isin(slots, tier.cold.drain())
        for division in self._divisions:
            division.updated(SGD(), 0)
        return self._rank[rows], missed, missed


class ColdRows(HostRows):
    """Notes the slots that are read."""

    def __init__(self, rows: int, row_bytes: int, fresh: FreshRows) -> None:
        super().__init__(rows, row_bytes, fresh)
        self._slots_read = [np.empty(0, dtype=np.int64)]

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        self._slots_read.append(slots.numpy())
        return super().read(slots)

    def drain(self) -> Int64Array:
        """Return the slots read since the call before."""
        found, self._slots_read = np.concatenate(self._slots_read), self._slots_read[:1]
        return found


def _tier(cache_slots: int, home_rows: int) -> TieredRows:
    tier = TieredRows(torch.zeros(cache_slots, 1), torch.zeros(cache_slots, 0), cache_slots, home_rows)
    row_bytes = tier.row_bytes + COUNT_BYTES
    tier.begin(lambda: ColdRows(home_rows, row_bytes, lambda slots: with_counts(packed(torch.zeros(len(slots), 1)))))
    return tier


def strategies(tables: Tables, memory_bytes: float) -> dict[str, Static | CacheSlots]:
    today = TieredStorage(int(memory_bytes), None).cache_slots(tables.keyspace.groups, LAYOUT)
    return {
        "recshard": Static(tables, *split_tables(tables, memory_bytes)),
        BY_ROWS: CacheSlots(tables, today, divides=False),
        FLEXD: CacheSlots(tables, today, divides=True),
    }


def replay(
    tables: Tables, held: dict[str, Static | CacheSlots], batches: Iterable[tuple[str, Int64Array]]
) -> dict[str, dict[str, Figures]]:
    """Return figures per step by strategy and period, of batches with their periods; "" is not counted."""
    world = LAYOUT.world_size
    row_bytes = np.repeat(tables.row_bytes, np.diff(tables.first))
    sums = {
        (name, period): {"slow": np.zeros(world), "rows": np.zeros(world), "seconds": np.zeros(world)}
        for name in held
        for period in (PLANNED, MOVED)
    }  # fmt: skip
    accesses, steps = {PLANNED: 0, MOVED: 0}, {PLANNED: 0, MOVED: 0}
    for period, keys in batches:
        rows, counts = np.unique(keys, return_counts=True)
        size = row_bytes[rows]
        for name, strategy in held.items():
            rank, slow, read = strategy.step(rows, counts)
            if not period:
                continue
            # With cache slots every row is read once per step; without, one is read a sample.
            reads = np.ones(len(rows)) if isinstance(strategy, CacheSlots) else counts.astype(np.float64)
            seconds = (reads - slow) * size / FAST_BYTES_PER_SECOND
            seconds += slow * size / SLOW_BYTES_PER_SECOND
            total = sums[name, period]
            for figure, values in (("slow", slow), ("rows", read), ("seconds", seconds)):
                total[figure] += np.bincount(rank, weights=values, minlength=world)
        if period:
            accesses[period] += len(keys)
            steps[period] += 1
    answer: dict[str, dict[str, Figures]] = {name: {} for name in held}
    for (name, period), total in sums.items():
        slow = total["slow"]
        answer[name][period] = {
            "slow accesses": float(slow.sum()) / steps[period], "rows read": float(total["rows"].sum()) / steps[period],
            "share": float(slow.sum()) / accesses[period],
            "balance": float(slow.max() / max(slow.mean(), 1e-300)),
            "reading_seconds": float(total["seconds"].max()) / steps[period],
        }  # fmt: skip
    return answer


def checks_of(answer: dict[str, dict[str, Figures]]) -> list[dict[str, Any]]:
    checks = []
    for period in (PLANNED, MOVED):
        ours, theirs = answer[FLEXD][period], answer["recshard"][period]
        for name, mine, least in (
            ("rows read / RecShard's slow accesses", "rows read", "slow accesses"),
            ("rows read / RecShard's, each once per step", "rows read", "rows read"),
            ("balance / RecShard's", "balance", "balance"),
        ):
            ratio = ours[mine] / max(theirs[least], 1e-300)
            checks.append(check(f"{period}: {name}", ratio, "< 1", ratio < 1))
    return checks


def section(options: Namespace) -> Outcome:
    torch.set_num_threads(1)
    number, steps, scale = (40, 10, 10_000.0) if options.quick else (400, 40, 1_000.0)
    pooled = [table for table in (read_tables(options.tables) if options.tables else made_up_tables()) if table.bags]
    tables = Tables.of([replace(table, batch=pooled[0].batch) for table in pooled[:number]], scale)
    answer = replay(tables, strategies(tables, memory_of(tables)), tables.periods(steps, MOVED_SHARE))
    # Tables made so small are as small as the batches: cache slots do not get warm, and only the balance is judged.
    checks = [entry for entry in checks_of(answer) if not options.quick or "balance" in entry["name"]]
    return Outcome({"strategies": answer}, checks)


def memory_of(tables: Tables) -> float:
    """Return the fast memory of a rank in bytes."""
    return FAST_SHARE * float(np.diff(tables.first) @ tables.stored_bytes) / LAYOUT.world_size
