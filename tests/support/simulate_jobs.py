"""Jobs of ranks: training with the bytes of every step, and the keys of the same steps for the simulator."""

from __future__ import annotations

from flexd.core.keyspace import KeySpace, TableSpec

TABLES = {
    "one group": (("item", 61, 8, "float32"), ("shop", 17, 8, "float32")),
    "two dims": (("item", 61, 8, "float32"), ("shop", 17, 5, "float32"), ("tiny", 3, 8, "float32")),
    "two dtypes": (("item", 61, 8, "float32"), ("shop", 17, 3, "float64")),
}


def keyspace_of(kind: str, optimizer: str) -> KeySpace:
    return KeySpace([TableSpec(name, rows, dim, dtype, optimizer) for name, rows, dim, dtype in TABLES[kind]])
