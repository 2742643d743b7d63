"""Sources of simulated accesses: a trace, a drifting Zipf stream, or a profile. Pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from flexd.core.errors import ConfigError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.sketch.profile import Profile, TableProfile
from flexd.stream.batches import Batch, Batches
from flexd.stream.sample_kinds import SampleKind, SampleLengths
from flexd.stream.trace import Trace
from flexd.stream.zipf import ZipfSampler, scatter, scatter_multiplier

Int64Array = npt.NDArray[np.int64]

MAX_STEP_ACCESSES = 2**28
"""Look-ups of one step of the whole job: 2 GiB of keys."""


class Accesses(Protocol):
    """Look-ups by step. ``passes`` returns the same for the same step every time."""

    @property
    def name(self) -> str:
        """Name in titles."""
        ...

    @property
    def made_of(self) -> str:
        """How the batches are made, in words."""
        ...

    @property
    def keyspace(self) -> KeySpace: ...

    @property
    def steps(self) -> int: ...

    @property
    def micro_batches(self) -> int:
        """Forward passes of a step."""
        ...

    def passes(self, step: int) -> list[tuple[Int64Array, ...]]:
        """Return by pass and rank int64 [n] keys; a key is repeated as often as it is looked up."""
        ...


def check_size(layout: RankLayout, batch_size: int, rows_per_sample: int, micro_batches: int = 1) -> None:
    """Raise ConfigError if a step of the job is too large."""
    accesses = layout.world_size * batch_size * rows_per_sample * micro_batches
    if not 0 < accesses <= MAX_STEP_ACCESSES:
        raise ConfigError(
            f"{layout.world_size} ranks x batch {batch_size} x {rows_per_sample} look-ups a sample",
            remedy=f"1 to {MAX_STEP_ACCESSES} look-ups a step: replay a smaller batch, with --scale for the latencies",
        )


@dataclass(frozen=True)
class RowFormat:
    """Dim, dtype and optimizer of the rows of all tables."""

    dim: int = 16
    dtype: str = "float32"
    optimizer: str = "rowwise_adagrad"

    def table(self, name: str, rows: int) -> TableSpec:
        return TableSpec(name, rows, self.dim, self.dtype, self.optimizer)


class TraceAccesses:
    """A trace as a next-item model reads it (``flexd.stream.batches``).

    Args:
        batch_size, steps: see ``Batches``.

    Raises:
        ConfigError: a step is too large.
        StreamError: the trace has too few samples, or none of that kind.
    """

    def __init__(
        self,
        name: str,
        trace: Trace,
        layout: RankLayout,
        rows: RowFormat,
        *,
        batch_size: int | None,
        steps: int | None,
        history: int,
        kind: SampleKind = SampleKind.SEQUENCES,
        lengths: SampleLengths = SampleLengths.FIXED,
        micro_batches: int = 1,
    ) -> None:
        check_size(layout, batch_size or 1, history + 1, micro_batches)
        self.micro_batches = micro_batches
        self.name = name
        self.keyspace = KeySpace(
            [rows.table(table, int(count)) for table, count in zip(trace.table_names, trace.table_rows, strict=True)]
        )
        self.batches = Batches(
            trace, world_size=layout.world_size, batch_size=batch_size, steps=steps, history=history, kind=kind,
            lengths=lengths, micro_batches=micro_batches,
        )  # fmt: skip
        self.steps = self.batches.steps
        self.made_of = self.batches.describe()

    def passes(self, step: int) -> list[tuple[Int64Array, ...]]:
        return [
            tuple(self._keys(self.batches.batch(step, rank, index)) for rank in range(self.batches.world_size))
            for index in range(self.micro_batches)
        ]

    def _keys(self, batch: Batch) -> Int64Array:
        return np.concatenate([self.keyspace.keys(table, ids) for table, ids in enumerate(batch.ids)])


def _random(seed: int, step: int, rank: int, source: int, micro_batch: int) -> np.random.Generator:
    """A generator of its own for each pass of each rank."""
    key = np.array([seed, micro_batch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, step, rank, source]))


def _drawn_words(accesses_per_rank: int, micro_batches: int) -> str:
    of = "step" if micro_batches == 1 else f"micro-batch, {micro_batches} micro-batches per step"
    return f"independent draws, {accesses_per_rank:,} a rank and {of}"


class ZipfAccesses:
    """One table whose k-th most popular row is looked up with probability proportional to k^-exponent.

    Each step ``drift_rows`` new rows enter at the top and every row falls as many places.

    Raises:
        ConfigError: a number is out of range, or a step is too large.
    """

    def __init__(
        self,
        layout: RankLayout,
        rows: RowFormat,
        *,
        table_rows: int,
        exponent: float,
        drift_rows: float,
        accesses_per_rank: int,
        steps: int,
        seed: int,
        micro_batches: int = 1,
    ) -> None:
        if not (0 < exponent <= 4 and 1 <= table_rows <= 2**40 and 0 <= drift_rows < math.inf and seed >= 0):
            raise ConfigError(
                f"Zipf {exponent} over {table_rows} rows, drift {drift_rows}, seed {seed}",
                remedy="exponent above 0 and up to 4, 1 to 2^40 rows, drift and seed of at least 0",
            )
        check_size(layout, accesses_per_rank, 1, micro_batches)
        self.name = f"Zipf {exponent:g}"
        self.made_of, self.micro_batches = _drawn_words(accesses_per_rank, micro_batches), micro_batches
        self.keyspace = KeySpace([rows.table("rows", table_rows)])
        self.steps = steps
        self._world_size = layout.world_size
        self._sampler = ZipfSampler(table_rows, exponent)
        self._rows, self._multiplier = table_rows, scatter_multiplier(table_rows)
        self._drift, self._count, self._seed = drift_rows, accesses_per_rank, seed

    def passes(self, step: int) -> list[tuple[Int64Array, ...]]:
        return [
            tuple(self._of_rank(step, rank, index) for rank in range(self._world_size))
            for index in range(self.micro_batches)
        ]

    def _of_rank(self, step: int, rank: int, index: int) -> Int64Array:
        random = _random(self._seed, step, rank, 0, index)
        ranks = self._sampler.sample(self._count, random) - math.floor(self._drift * step)
        return scatter(ranks, self._rows, self._multiplier)


class ProfileAccesses:
    """Independent draws from a profile: its listed rows by their share, the rest by its frequency bins.

    The rows of a bin are not known by name; they are taken to be the lowest ids that are not listed.

    Raises:
        ConfigError: the profile has seen nothing or lists other tables, or a step is too large.
    """

    def __init__(
        self,
        name: str,
        profile: Profile,
        tables: Sequence[TableSpec],
        layout: RankLayout,
        *,
        accesses_per_rank: int,
        steps: int,
        seed: int,
        micro_batches: int = 1,
    ) -> None:
        if [table.table for table in profile.tables] != [table.name for table in tables]:
            raise ConfigError(f"{name}: a profile of other tables", remedy="give the tables it was made with")
        check_size(layout, accesses_per_rank, 1, micro_batches)
        weights = np.array([table.weight for table in profile.tables])
        if not weights.sum() > 0:
            raise ConfigError(f"{name}: the profile has seen no access", remedy="make it from a stream")
        self.name, self.keyspace, self.steps = name, KeySpace(tables), steps
        self.made_of, self.micro_batches = _drawn_words(accesses_per_rank, micro_batches), micro_batches
        self._world_size, self._count, self._seed = layout.world_size, accesses_per_rank, seed
        self._shares = weights / weights.sum()
        self._draws = [_TableDraw(table) if table.weight > 0 else None for table in profile.tables]

    def passes(self, step: int) -> list[tuple[Int64Array, ...]]:
        return [
            tuple(self._of_rank(step, rank, index) for rank in range(self._world_size))
            for index in range(self.micro_batches)
        ]

    def _of_rank(self, step: int, rank: int, index: int) -> Int64Array:
        random = _random(self._seed, step, rank, 1, index)
        counts = random.multinomial(self._count, self._shares)
        drawn = [
            self.keyspace.keys(index, draw.rows(int(count), random))
            for index, (draw, count) in enumerate(zip(self._draws, counts, strict=True))
            if draw is not None
        ]
        return np.concatenate(drawn)


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
