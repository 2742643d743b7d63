"""Planning problems of production size: table lists and Zipf profiles in closed form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.planner.tables.sharding import ListedTable
from flexd.sketch.profile import Profile, zipf_table


def made_up_tables(pooled: int = 400) -> list[ListedTable]:
    """A list of the same shape: two sequence tables of 80M rows, and pooled tables of log-normal size and look-ups."""
    rng = np.random.default_rng(0)
    rows = np.exp(rng.normal(11.0, 2.5, pooled)).clip(10, 2e7).astype(int)
    lookups = np.exp(rng.normal(1.5, 1.2, pooled)).clip(1, 200)
    dims = rng.choice([4, 8, 64, 128], pooled, p=[0.2, 0.4, 0.1, 0.3])
    return [
        ListedTable("sequence_a", 80_000_000, 128, 6066.0, 0.0, 2560, "RW"),
        ListedTable("sequence_b", 80_000_000, 128, 9099.0, 0.0, 2560, "RW"),
        *(
            ListedTable(f"pooled_{i:04d}", int(rows[i]), int(dims[i]), float(lookups[i]), 1.0, 2560, "CW")
            for i in range(pooled)
        ),
    ]


def problem_of(
    tables: Sequence[ListedTable], ranks: int, exponent: float, listed: Sequence[int]
) -> tuple[Profile, KeySpace]:
    """float16 rows with row-wise Adagrad; every table Zipf with this exponent; ``listed`` rows of each table."""
    keyspace = KeySpace([TableSpec(t.name, t.rows, t.dim, "float16", "rowwise_adagrad") for t in tables])
    profiles = tuple(
        zipf_table(t.name, t.rows, exponent, listed[i], t.lookups * t.batch * ranks, 7919 * i)
        for i, t in enumerate(tables)
    )
    return Profile(profiles, generation=1, samples=10**9), keyspace
