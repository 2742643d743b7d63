"""Memory of counters in use."""

from __future__ import annotations

from typing import Any

import numpy as np


def array_bytes(value: Any) -> int:
    """Return the memory of the arrays that an object and its parts hold."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    parts = value.values() if isinstance(value, dict) else vars(value).values() if hasattr(value, "__dict__") else ()
    return sum(map(array_bytes, parts))


def counter_bytes(sketches: Any) -> int:
    """Return the memory of the counters of all tables of a ``SketchSet``, without touches."""
    return sum(array_bytes(table.sketch) for table in sketches._tables.values())
