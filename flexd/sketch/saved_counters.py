"""The counters of saved sketches: their arrays, and how they are loaded again. ``saved_state`` has the description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flexd.core.errors import SketchError
from flexd.sketch.coaccess import CoAccessSample
from flexd.sketch.decay import ForwardDecay
from flexd.sketch.quantiles import KllQuantiles
from flexd.sketch.saved_state import SavedTable
from flexd.sketch.table_sketch import Arrays, TableSketch
from flexd.sketch.touch_counts import TableTouches

_DAMAGED = (KeyError, TypeError, ValueError, AttributeError)
_LENGTHS = "sequence_lengths"
_TOUCHES = "touches"
"""Only in the description of a table whose touches were counted."""


def arrays_of(
    tables: Sequence[TableSketch], lengths: Mapping[int, KllQuantiles], touches: Sequence[TableTouches]
) -> tuple[list[dict[str, Any]], Arrays]:
    """Return copies of the counters: (description of each table, arrays named ``index/...``)."""
    metas: list[dict[str, Any]] = []
    arrays: Arrays = {}
    for index, sketch in enumerate(tables):
        meta, parts = sketch.state()
        metas.append(meta)
        arrays.update({f"{index}/{name}": array for name, array in parts.items()})
    for index, quantiles in lengths.items():
        arrays[f"{index}/{_LENGTHS}"] = quantiles.serialized()
    for index, touched in enumerate(touches):
        meta, parts = touched.state()
        if parts:
            metas[index][_TOUCHES] = meta
            arrays.update({f"{index}/{name}": array for name, array in parts.items()})
    return metas, arrays


def load_clock(clock: ForwardDecay, saved: Mapping[str, Any]) -> None:
    """Set a clock to a saved one. Raises SketchError if that is malformed."""
    try:
        clock.load(dict(saved))
    except _DAMAGED as error:
        raise SketchError(f"saved clock is damaged: {error!r}", remedy="use an earlier snapshot") from error


def load_table(sketch: TableSketch, saved: SavedTable, arrays: Arrays) -> KllQuantiles | None:
    """Load the saved counters of a table. Return its sequence lengths, if some were counted.

    Raises:
        SketchError: they are damaged, or do not fit.
    """
    prefix = f"{saved.index}/"
    parts = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    try:
        sketch.load(saved.meta, parts)
        lengths = KllQuantiles() if _LENGTHS in parts else None
        if lengths is not None:
            lengths.load(parts[_LENGTHS])
    except _DAMAGED as error:
        raise SketchError(f"sketch state is damaged: {error!r}", remedy="use an earlier snapshot") from error
    return lengths


def load_touches(touches: TableTouches, saved: SavedTable, arrays: Arrays) -> None:
    """Load the saved touches of a table, if there are some. Raises SketchError if they are damaged."""
    if _TOUCHES not in saved.meta:
        return
    prefix = f"{saved.index}/"
    parts = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    try:
        touches.load(saved.meta[_TOUCHES], parts)
    except _DAMAGED as error:
        raise SketchError(f"sketch state is damaged: {error!r}", remedy="use an earlier snapshot") from error


def load_coaccess(sample: CoAccessSample, saved: Mapping[str, Any], arrays: Arrays, tables: Sequence[int]) -> None:
    """Load a saved sample of rows that occur together, as ``CoAccessSample.load``. Raises SketchError if damaged."""
    try:
        sample.load(dict(saved), arrays, tables)
    except _DAMAGED as error:
        raise SketchError(f"saved co-access sample is damaged: {error!r}", remedy="use an earlier snapshot") from error
