"""The sketch of a table by the kind chosen for it."""

from __future__ import annotations

from flexd.keyspace import TableSpec
from flexd.sketch import countmin, curve, dense, hotset, logarithmic, sample
from flexd.sketch.budget import TableChoice
from flexd.sketch.logarithmic_table import LogTable
from flexd.sketch.tables import CountMinTable, DenseTable, TableSketch


def make_table(spec: TableSpec, choice: TableChoice, seed: int, conservative: bool = True) -> TableSketch:
    """An empty sketch of the chosen kind."""
    if choice.kind == "dense":
        return DenseTable(spec, choice, seed)
    if choice.kind == "logarithmic":
        return LogTable(spec, choice, seed)
    return CountMinTable(spec, choice, seed, conservative)


def warm_up() -> None:
    """Compiles all kernels (or loads them from numba's cache): seconds the first time, a moment later on."""
    dense.warm_up()
    logarithmic.warm_up()
    countmin.warm_up()
    hotset.warm_up()
    curve.warm_up()
    sample.warm_up()
