"""The job of ``cases.ranking``: tables scaled from a list, and the batches of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import flexd
from flexd.core.placement import RankLayout
from flexd.planner.tables.sharding import ListedTable

Int64Array = npt.NDArray[np.int64]

POOLED, SEQUENCES = "bags", "rows"
"""Modules of the model, by which TorchRec's plans name tables."""
MOST_ROWS, ROWS_SHARE = 200_000, 1 / 400
MOST_LOOKUPS, SEQUENCE_LOOKUPS = 100.0, (40, 60)
DIMS = (8, 64)
DENSE = 13


@dataclass(frozen=True)
class Setting:
    """One job.

    Attributes:
        tables: scaled tables, as keyword arguments of ``ListedTable``.
        samples: of a rank in a step.
        zipf: exponent of every table's popularity.
        batches: of each rank, used round and round.
    """

    tables: tuple[dict[str, Any], ...]
    nodes: int = 2
    local_ranks: int = 2
    samples: int = 128
    zipf: float = 1.05
    batches: int = 8

    @property
    def layout(self) -> RankLayout:
        return RankLayout(self.nodes, self.local_ranks)

    def listed(self) -> list[ListedTable]:
        return [ListedTable(**(table | {"ranks": tuple(table["ranks"])})) for table in self.tables]

    def embedding_tables(self) -> list[flexd.EmbeddingTable]:
        """Pooled tables are ``EmbeddingBagTable``."""
        return [
            (flexd.EmbeddingBagTable if table.bags else flexd.EmbeddingTable)(table.name, table.rows, table.dim)
            for table in self.listed()
        ]


def scaled(listed: Sequence[ListedTable], pooled: int, samples: int) -> tuple[dict[str, Any], ...]:
    """Return pooled tables of a list, more of those with much traffic, and its largest sequence tables, made small.

    Rows are divided and cut, look-ups of a bag cut, dims brought into ``DIMS``, and sequences made ``SEQUENCE_LOOKUPS``
    long.
    """
    by_traffic = sorted((t for t in listed if t.bags > 0), key=lambda t: -t.lookups * t.dim)
    at = np.unique((np.linspace(0, 1, pooled) ** 2 * (len(by_traffic) - 1)).astype(int))
    sequences = sorted((t for t in listed if t.bags == 0), key=lambda t: -t.lookups)[: len(SEQUENCE_LOOKUPS)]
    made = [
        ListedTable(
            f"p{number}", int(np.clip(table.rows * ROWS_SHARE, 8, MOST_ROWS)), int(np.clip(table.dim, *DIMS)) // 4 * 4,
            float(np.clip(table.lookups / max(table.bags, 1.0), 1.0, MOST_LOOKUPS)), 1.0, samples,
            module=POOLED,
        )
        for number, table in enumerate(by_traffic[i] for i in at.tolist())
    ]  # fmt: skip
    made += [
        ListedTable(
            f"s{number}", int(np.clip(table.rows * ROWS_SHARE, 8, MOST_ROWS)), DIMS[1], float(length), 0.0, samples,
            module=SEQUENCES,
        )
        for number, (table, length) in enumerate(zip(sequences, SEQUENCE_LOOKUPS, strict=False))
    ]  # fmt: skip
    return tuple(asdict(table) for table in made)


@dataclass(frozen=True)
class Batch:
    """Samples of one rank and step.

    Attributes:
        values: int64 [n] by table, sample by sample.
        lengths: int64 [samples] by table.
        dense: float32 [samples, DENSE].
        labels: float32 [samples].
    """

    values: dict[str, Int64Array]
    lengths: dict[str, Int64Array]
    dense: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]


def batches_of(setting: Setting, rank: int) -> list[Batch]:
    tables = setting.listed()
    cumulative = {table.name: np.cumsum(np.arange(1, table.rows + 1.0) ** -setting.zipf) for table in tables}
    places = {
        table.name: np.random.default_rng([1, number]).permutation(table.rows) for number, table in enumerate(tables)
    }
    found = []
    for step in range(setting.batches):
        rng = np.random.default_rng([2, rank, step])
        values, lengths = {}, {}
        for table in tables:
            each = np.full(setting.samples, int(table.lookups))
            if table.bags:
                each = rng.poisson(table.lookups, setting.samples)
            share = cumulative[table.name]
            drawn = np.searchsorted(share, rng.random(int(each.sum())) * share[-1])
            values[table.name] = places[table.name][np.minimum(drawn, table.rows - 1)]
            lengths[table.name] = each
        dense = rng.normal(size=(setting.samples, DENSE)).astype(np.float32)
        found.append(Batch(values, lengths, dense, rng.integers(0, 2, setting.samples).astype(np.float32)))
    return found
