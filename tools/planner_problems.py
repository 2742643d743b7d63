"""Planning problems of production size: table lists and Zipf profiles in closed form."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.planner.model.training_shape import TrainingShape
from flexd.sketch.profile import Profile, TableProfile

TAIL_BINS = 256
SEQUENCE = "sequence"


@dataclass(frozen=True)
class ListedTable:
    """One line of a table list.

    Attributes:
        lookups: of one sample.
        bags: sum-pooled bags of one sample (features); 0: un-pooled.
        batch: samples of a rank in one step.
        perf_ms: TorchRec's estimate, summed over the ranks; NaN if unknown.
        sharding: as TorchRec chose.
    """

    name: str
    rows: int
    dim: int
    lookups: float
    bags: float
    batch: int
    perf_ms: float
    sharding: str
    shards: int


def read_tables(path: Path) -> list[ListedTable]:
    """Columns as in TorchRec's published sharding example. A line without a batch gets 2560, a name that comes again a
    number."""
    tables: list[ListedTable] = []
    seen: Counter[str] = Counter()
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            batch = line["batch"].split("*")[0]
            seen[line["fqn"]] += 1
            again = seen[line["fqn"]]
            tables.append(
                ListedTable(
                    name=line["fqn"] + (f"#{again}" if again > 1 else ""),
                    rows=int(float(line["hash_size"])),
                    dim=int(float(line["emb_dim"])),
                    lookups=float(line["sum_pooling_factor"]),
                    bags=0.0 if line["output"] == SEQUENCE else max(float(line["sum_num_poolings"]), 1.0),
                    batch=int(batch) if batch.isdigit() else 2560,
                    perf_ms=float(line["perf_ms"] or "nan"),
                    sharding=line["sharding"],
                    shards=int(float(line["n_shards"])),
                )
            )
    return tables


def made_up_tables(pooled: int = 400) -> list[ListedTable]:
    """A list of the same shape: two sequence tables of 80M rows, and pooled tables of log-normal size and look-ups."""
    rng = np.random.default_rng(0)
    rows = np.exp(rng.normal(11.0, 2.5, pooled)).clip(10, 2e7).astype(int)
    lookups = np.exp(rng.normal(1.5, 1.2, pooled)).clip(1, 200)
    dims = rng.choice([4, 8, 64, 128], pooled, p=[0.2, 0.4, 0.1, 0.3])
    nan = float("nan")
    return [
        ListedTable("sequence_a", 80_000_000, 128, 6066.0, 0.0, 2560, nan, "RW", 96),
        ListedTable("sequence_b", 80_000_000, 128, 9099.0, 0.0, 2560, nan, "RW", 96),
        *(
            ListedTable(f"pooled_{i:04d}", int(rows[i]), int(dims[i]), float(lookups[i]), 1.0, 2560, nan, "CW", 1)
            for i in range(pooled)
        ),
    ]


def zipf_table(name: str, rows: int, exponent: float, listed: int, accesses_per_step: float, turn: int) -> TableProfile:
    """Share of the k-th most frequent row ~ k^-exponent; the first ``listed`` rows one by one, the rest in bins.

    The sum over a bin [m, n) is the integral of x^-s from m - 1/2 to n - 1/2 (midpoint rule, relative error at most
    s(s+1) / 24 m^2).
    Row ids are spread over the table by a stride that shares no factor with its rows; ``turn`` shifts them.
    """
    listed = min(listed, rows)
    frequency = np.arange(1, listed + 1, dtype=np.float64) ** -exponent
    edges = np.unique(np.geomspace(listed + 1, rows + 1, TAIL_BINS).astype(np.int64)) if listed < rows else np.empty(0)
    low, high = edges[:-1] - 0.5, edges[1:] - 0.5
    power = 1.0 - exponent
    summed = np.log(high / low) if abs(power) < 1e-9 else (high**power - low**power) / power
    number = high - low
    total = float(frequency.sum() + summed.sum())
    stride = max(int(rows * 0.6180339887), 1)
    while math.gcd(stride, rows) != 1:
        stride += 1
    share = frequency / total
    return TableProfile(
        table=name,
        rows=rows,
        weight=1e9,
        accesses_per_step=accesses_per_step,
        hot_rows=(np.arange(listed, dtype=np.int64) * stride + turn) % rows,
        hot_share=share,
        hot_lower=share,
        hot_upper=share,
        bin_share=summed / number / total if len(number) else np.empty(0),
        bin_rows=number if len(number) else np.empty(0),
        distinct_rows=float(rows),
        coverage=1.0,
    )


def problem_of(
    tables: Sequence[ListedTable], ranks: int, exponent: float, listed: Sequence[int]
) -> tuple[Profile, KeySpace, TrainingShape]:
    """float16 rows with row-wise Adagrad; every table Zipf with this exponent; ``listed`` rows of each table."""
    keyspace = KeySpace([TableSpec(t.name, t.rows, t.dim, "float16", "rowwise_adagrad") for t in tables])
    profiles = tuple(
        zipf_table(t.name, t.rows, exponent, listed[i], t.lookups * t.batch * ranks, 7919 * i)
        for i, t in enumerate(tables)
    )
    shape = TrainingShape(bags_per_step={t.name: t.bags * t.batch for t in tables if t.bags > 0})
    return Profile(profiles, generation=1, samples=10**9), keyspace, shape
