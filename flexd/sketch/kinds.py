"""The sketch of a table by the kind chosen for it."""

from __future__ import annotations

from collections.abc import Collection

from flexd.core.keyspace import TableSpec
from flexd.sketch import curve, sample
from flexd.sketch.budget import TableChoice
from flexd.sketch.counters import countmin, dense, logarithmic
from flexd.sketch.counters import hot_set as hotset
from flexd.sketch.logarithmic_table import LogTable
from flexd.sketch.tables import CountMinTable, DenseTable, TableSketch

_WARM_UPS = {"dense": dense.warm_up, "logarithmic": logarithmic.warm_up, "count_min": countmin.warm_up}
KINDS = tuple(_WARM_UPS)


def make_table(spec: TableSpec, choice: TableChoice, seed: int, conservative: bool = True) -> TableSketch:
    """An empty sketch of the chosen kind."""
    if choice.kind == "dense":
        return DenseTable(spec, choice, seed)
    if choice.kind == "logarithmic":
        return LogTable(spec, choice, seed)
    return CountMinTable(spec, choice, seed, conservative)


def warm_up(used: Collection[str] = KINDS) -> None:
    """Compiles the kernels of these kinds (or loads them from numba's cache), and those that every kind needs."""
    for kind, warm_up_kind in _WARM_UPS.items():
        if kind in used:
            warm_up_kind()
    hotset.warm_up()
    curve.warm_up()
    sample.warm_up()
