"""Simulated accesses: a trace, a drifting Zipf stream, or a profile, as pure functions of the step; the distinct rows
of a step, of every rank, of every node and of the job; and what these say of several steps: presence probabilities, and
a profile that is counted exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flexd.core.arrays import Float64Array, Int64Array
from flexd.core.errors import ConfigError, PlanError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.sketch.profile import Profile, RowTouches, TableProfile
from flexd.stream.batches import Batches
from flexd.stream.sample_kinds import BatchOptions
from flexd.stream.trace import Trace, ZipfSampler, scatter, scatter_multiplier


@dataclass(frozen=True)
class StepKeys:
    """The id sets of one step, worked out once for all strategies. All arrays are int64.

    A *pair* is a row that a rank looks up, a *node pair* a row that any rank of a node looks up.

    Attributes:
        rank, count: [pairs], which rank, and how often it looks the row up; pairs stand rank by rank.
        node: [node pairs], which node.
        pair_row, node_row: of pairs and node pairs, index into ``rows``.
        rows: [distinct rows], keys, ascending.
    """

    rank: Int64Array
    count: Int64Array
    node: Int64Array
    pair_row: Int64Array
    node_row: Int64Array
    rows: Int64Array

    @staticmethod
    def of(keys: Sequence[Int64Array], layout: RankLayout) -> StepKeys:
        """``keys``: by rank, int64 [n] keys looked up, in any order, repeats as often as they are looked up."""
        ranks = [np.unique(mine, return_counts=True) for mine in keys]
        nodes = [
            np.unique(np.concatenate([ranks[rank][0] for rank in layout.node_ranks(node)]))
            for node in range(layout.nodes)
        ]
        rows = np.unique(np.concatenate(nodes))
        return StepKeys(
            rank=np.repeat(np.arange(len(ranks)), [len(unique) for unique, _ in ranks]),
            count=np.concatenate([count for _, count in ranks]).astype(np.int64, copy=False),
            node=np.repeat(np.arange(len(nodes)), [len(node) for node in nodes]),
            pair_row=np.concatenate([np.searchsorted(rows, unique) for unique, _ in ranks]),
            node_row=np.concatenate([np.searchsorted(rows, node) for node in nodes]),
            rows=rows,
        )


@dataclass(frozen=True)
class StepPasses:
    """The keys of one step, worked out once for all strategies.

    Attributes:
        each: of every micro-batch.
        whole: of all of them together.
    """

    each: tuple[StepKeys, ...]
    whole: StepKeys

    @staticmethod
    def of(passes: Sequence[Sequence[Int64Array]], layout: RankLayout) -> StepPasses:
        """``passes``: by micro-batch and rank, as ``StepKeys.of`` takes them."""
        each = tuple(StepKeys.of(keys, layout) for keys in passes)
        if len(each) == 1:
            return StepPasses(each, each[0])
        return StepPasses(each, StepKeys.of([np.concatenate(of_rank) for of_rank in zip(*passes, strict=True)], layout))


class TouchCounter:
    """Sums of the steps that it has seen."""

    def __init__(self, layout: RankLayout) -> None:
        self._layout = layout
        self._steps = 0
        self._accesses = np.zeros(layout.world_size, dtype=np.int64)
        self._busiest = self._rank_rows = self._node_rows = self._job_rows = 0

    def see(self, keys: StepKeys) -> None:
        accesses = np.bincount(keys.rank, weights=keys.count, minlength=self._layout.world_size).astype(np.int64)
        self._steps += 1
        self._accesses += accesses
        self._busiest += int(accesses.max())
        self._rank_rows += len(keys.rank)
        self._node_rows += len(keys.node)
        self._job_rows += len(keys.rows)

    def figures(self) -> dict[str, Any]:
        """Return means a step: of a rank, a node, and the job.

        ``node_over_rank`` and ``job_over_node`` are 1 where all ranks (nodes) need the same rows, and the number of
        local ranks (nodes) where no row is needed by two of them.
        """
        layout = self._layout
        steps, each = max(1, self._steps), max(1, self._steps) * layout.world_size
        accesses = float(self._accesses.sum()) / each
        rank, node = self._rank_rows / each, self._node_rows / (steps * layout.nodes)
        job = self._job_rows / steps
        return {
            "accesses_of_rank": accesses,
            "accesses_of_busiest_rank": self._busiest / steps,
            "rows_of_rank": rank,
            "rows_of_node": node,
            "rows_of_job": job,
            "node_over_rank": node / rank if rank else None,
            "job_over_node": job / node if node else None,
        }


def exact_profile(
    passes: Sequence[Sequence[Int64Array]],
    keyspace: KeySpace,
    layout: RankLayout | None = None,
    micro_batches: int = 1,
) -> Profile:
    """Return a profile that lists every row that was looked up, with its exact share.

    Args:
        passes: by forward pass and rank, int64 [n] keys.
        layout: of the ranks. With it the profile has the touches of every row in a pass, counted in these.
        micro_batches: passes of a step.

    Raises:
        PlanError: no passes, or no access in them.
    """
    keys = [mine for ranks in passes for mine in ranks]
    total = sum(len(mine) for mine in keys)
    if not total:
        raise PlanError("no accesses to count", remedy="replay more steps, or larger batches")
    rows, counts = np.unique(np.concatenate(keys), return_counts=True)
    table_of = keyspace.table_of(rows)
    touches = None if layout is None else _touches(passes, rows, layout)
    made = []
    for index, table in enumerate(keyspace.tables):
        mine = np.flatnonzero(table_of == index)
        mine = mine[np.argsort(-counts[mine], kind="stable")]
        weight = float(counts[mine].sum())
        share = counts[mine] / weight if weight else np.empty(0)
        made.append(
            TableProfile(
                table=table.name,
                rows=table.rows,
                weight=weight,
                accesses_per_step=weight * micro_batches / len(passes),
                hot_rows=rows[mine] - keyspace.first_key[index],
                hot_share=share,
                bin_share=np.empty(0),
                bin_rows=np.empty(0),
                distinct_rows=float(len(mine)),
                touches=None
                if layout is None or touches is None
                else RowTouches(layout.nodes, layout.local_ranks, *touches[:, mine]),
            )
        )
    return Profile(tuple(made), samples=total)


def _touches(passes: Sequence[Sequence[Int64Array]], rows: Int64Array, layout: RankLayout) -> Float64Array:
    """Return float64[3, rows]: means a pass over the ranks, over the nodes, and of the job."""
    counts = np.zeros((3, len(rows)))
    for ranks in passes:
        keys = StepKeys.of(ranks, layout)
        at = np.searchsorted(rows, keys.rows)
        counts[0, at] += np.bincount(keys.pair_row, minlength=len(at))
        counts[1, at] += np.bincount(keys.node_row, minlength=len(at))
        counts[2, at] += 1
    touches: Float64Array = counts / (len(passes) * np.array([[layout.world_size], [layout.nodes], [1]]))
    return touches


MAX_STEP_ACCESSES = 2**28
"""Look-ups of one step of the whole job: 2 GiB of keys."""
Passes = list[tuple[Int64Array, ...]]
"""By forward pass and rank int64 [n] keys; a key is repeated as often as it is looked up."""


@dataclass(frozen=True)
class Accesses:
    """Look-ups by step.

    Attributes:
        name: in titles.
        made_of: how the batches are made, in words.
        micro_batches: forward passes of a step.
        passes: returns those of a step, the same for the same step every time.
        batches: of a trace; None where look-ups are drawn row by row.
    """

    name: str
    made_of: str
    keyspace: KeySpace
    steps: int
    micro_batches: int
    passes: Callable[[int], Passes]
    batches: Batches | None = None


def check_size(layout: RankLayout, batch_size: int, rows_per_sample: int, micro_batches: int = 1) -> None:
    """Raise ConfigError if a step of the job is too large."""
    accesses = layout.world_size * batch_size * rows_per_sample * micro_batches
    if not 0 < accesses <= MAX_STEP_ACCESSES:
        raise ConfigError(
            f"{layout.world_size} ranks x batch {batch_size} x {rows_per_sample} look-ups a sample",
            remedy=f"1 to {MAX_STEP_ACCESSES} look-ups a step: replay a smaller batch, with --scale for the latencies",
        )


def trace_accesses(
    name: str,
    trace: Trace,
    layout: RankLayout,
    row: TableSpec,
    options: BatchOptions,
) -> Accesses:
    """Return a trace as a next-item model reads it (``flexd.stream.batches``).

    Args:
        row: dim, dtype and optimizer of the rows of all tables.

    Raises:
        ConfigError: a step is too large.
        StreamError: the trace has too few samples, or none of that kind.
    """
    micro_batches = options.micro_batches
    check_size(layout, options.batch_size or 1, options.history + 1, micro_batches)
    keyspace = KeySpace(
        [
            replace(row, name=table, rows=int(count))
            for table, count in zip(trace.table_names, trace.table_rows, strict=True)
        ]
    )
    batches = Batches(trace, layout.world_size, options)

    def keys(step: int, rank: int, micro_batch: int) -> Int64Array:
        ids = batches.batch(step, rank, micro_batch).ids
        return np.concatenate([keyspace.keys(table, rows) for table, rows in enumerate(ids)])

    passes = _passes(layout, micro_batches, keys)
    return Accesses(name, batches.describe(), keyspace, batches.steps, micro_batches, passes, batches)


def _passes(
    layout: RankLayout, micro_batches: int, keys: Callable[[int, int, int], Int64Array]
) -> Callable[[int], Passes]:
    """Return ``Accesses.passes`` of the keys by step, rank and micro-batch."""
    return lambda step: [
        tuple(keys(step, rank, micro_batch) for rank in range(layout.world_size))
        for micro_batch in range(micro_batches)
    ]


def _drawn(
    name: str,
    keyspace: KeySpace,
    layout: RankLayout,
    draw: Callable[[int, np.random.Generator], Int64Array],
    *,
    accesses_per_rank: int,
    steps: int,
    seed: int,
    micro_batches: int,
    source: int,
) -> Accesses:
    """Return independent draws: keys by step and random generator, of which each pass of each rank has its own."""
    check_size(layout, accesses_per_rank, 1, micro_batches)
    per = "step" if micro_batches == 1 else f"micro-batch, {micro_batches} micro-batches per step"

    def keys(step: int, rank: int, micro_batch: int) -> Int64Array:
        key = np.array([seed, micro_batch], dtype=np.uint64)
        return draw(step, np.random.Generator(np.random.Philox(key=key, counter=[0, step, rank, source])))

    return Accesses(
        name, f"independent draws, {accesses_per_rank:,} a rank and {per}", keyspace, steps, micro_batches,
        _passes(layout, micro_batches, keys),
    )  # fmt: skip


def zipf_accesses(
    layout: RankLayout,
    row: TableSpec,
    *,
    table_rows: int,
    exponent: float,
    drift_rows: float,
    accesses_per_rank: int,
    steps: int,
    seed: int,
    micro_batches: int = 1,
) -> Accesses:
    """Return one table whose k-th most popular row is looked up with probability proportional to k^-exponent.

    Each step ``drift_rows`` new rows enter at the top and every row falls as many places.

    Raises:
        ConfigError: a number is out of range, or a step is too large.
    """
    if not (0 < exponent <= 4 and 1 <= table_rows <= 2**40 and 0 <= drift_rows < math.inf and seed >= 0):
        raise ConfigError(
            f"Zipf {exponent} over {table_rows} rows, drift {drift_rows}, seed {seed}",
            remedy="exponent above 0 and up to 4, 1 to 2^40 rows, drift and seed of at least 0",
        )
    sampler, multiplier = ZipfSampler(table_rows, exponent), scatter_multiplier(table_rows)

    def draw(step: int, random: np.random.Generator) -> Int64Array:
        ranks = sampler.sample(accesses_per_rank, random) - math.floor(drift_rows * step)
        return scatter(ranks, table_rows, multiplier)

    return _drawn(
        f"Zipf {exponent:g}", KeySpace([replace(row, name="rows", rows=table_rows)]), layout, draw, source=0,
        accesses_per_rank=accesses_per_rank, steps=steps, seed=seed, micro_batches=micro_batches,
    )  # fmt: skip


def profile_accesses(
    name: str,
    profile: Profile,
    tables: Sequence[TableSpec],
    layout: RankLayout,
    *,
    accesses_per_rank: int,
    steps: int,
    seed: int,
    micro_batches: int = 1,
) -> Accesses:
    """Return independent draws from a profile: its listed rows by their share, the rest by its frequency bins.

    The rows of a bin are not known by name; they are taken to be the lowest ids that are not listed.

    Raises:
        ConfigError: the profile has seen nothing, or a step is too large.
    """
    weights = np.array([table.weight for table in profile.tables])
    if not weights.sum() > 0:
        raise ConfigError(f"{name}: the profile has seen no access", remedy="make it from a stream")
    keyspace, shares = KeySpace(tables), weights / weights.sum()
    draws = [_TableDraw(table) if table.weight > 0 else None for table in profile.tables]

    def draw(step: int, random: np.random.Generator) -> Int64Array:
        counts = random.multinomial(accesses_per_rank, shares)
        return np.concatenate(
            [
                keyspace.keys(index, of_table.rows(int(count), random))
                for index, (of_table, count) in enumerate(zip(draws, counts, strict=True))
                if of_table is not None
            ]
        )

    return _drawn(
        name, keyspace, layout, draw, source=1, accesses_per_rank=accesses_per_rank, steps=steps, seed=seed,
        micro_batches=micro_batches,
    )  # fmt: skip


class _TableDraw:
    """Rows of one table by inverse of the cumulated shares."""

    def __init__(self, table: TableProfile) -> None:
        self._hot = table.hot_rows
        bins = table.bin_rows > 0
        shares = [table.hot_share, table.bin_share[bins] * table.bin_rows[bins]]
        rest = max(0.0, 1.0 - float(shares[0].sum()) - float(shares[1].sum()))
        unlisted = table.rows - len(self._hot)
        ends = np.minimum(np.cumsum(table.bin_rows[bins]), unlisted)
        # What neither rows nor bins explain is spread over all the rows that are not listed.
        self._starts = np.concatenate([[0.0], ends[:-1], [0.0]]) if len(ends) else np.zeros(1)
        self._ends = np.concatenate([ends, [float(unlisted)]])
        share = np.concatenate([*shares, [rest if unlisted else 0.0]])
        self._cumulated = np.cumsum(share)
        ascending = np.sort(self._hot)
        self._gaps = ascending - np.arange(len(ascending))
        self._rows = table.rows

    def rows(self, count: int, random: np.random.Generator) -> Int64Array:
        """int64 [count]."""
        at = np.searchsorted(self._cumulated, random.random(count) * self._cumulated[-1], side="right")
        at = np.minimum(at, len(self._cumulated) - 1)
        rows = np.empty(count, dtype=np.int64)
        listed = at < len(self._hot)
        rows[listed] = self._hot[at[listed]]
        which = at[~listed] - len(self._hot)
        low, high = self._starts[which], self._ends[which]
        place = (low + random.random(len(which)) * np.maximum(high - low, 1.0)).astype(np.int64)
        # The place-th row that is not listed: as many listed rows stand before it as have a gap up to it.
        rows[~listed] = np.minimum(place + np.searchsorted(self._gaps, place, side="right"), self._rows - 1)
        return rows
