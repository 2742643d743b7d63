"""Makes the sketch of a table by the kind chosen for it."""

from __future__ import annotations

from collections.abc import Collection

from flexd.core.keyspace import TableSpec
from flexd.sketch import coaccess_kernels, curve, dense_table, logarithmic_table, sample
from flexd.sketch.count_min_table import CountMinTable
from flexd.sketch.counters import countmin, hot_set
from flexd.sketch.dense_table import DenseTable
from flexd.sketch.logarithmic_table import LogTable
from flexd.sketch.table_sketch import TableSketch
from flexd.sketch.types import Kind, TableChoice

_WARM_UPS = {"dense": dense_table.warm_up, "logarithmic": logarithmic_table.warm_up, "count_min": countmin.warm_up}
_TABLES: dict[Kind, type[TableSketch]] = {"dense": DenseTable, "logarithmic": LogTable, "count_min": CountMinTable}


def make_table(spec: TableSpec, choice: TableChoice, seed: int) -> TableSketch:
    """Return an empty sketch of the chosen kind."""
    return _TABLES[choice.kind](spec, choice, seed)


def warm_up(used: Collection[str] = tuple(_WARM_UPS), *, coaccess: bool = False) -> None:
    """Compile the kernels before the first message, which takes seconds, or little with numba's cache.

    Args:
        used: kinds of tables, as in ``TableChoice.kind``; the kernels that every kind needs are always compiled.
        coaccess: whether rows that occur together are sampled.
    """
    for kind, warm_up_kind in _WARM_UPS.items():
        if kind in used:
            warm_up_kind()
    hot_set.warm_up()
    curve.warm_up()
    sample.warm_up()
    if coaccess:
        coaccess_kernels.warm_up()
