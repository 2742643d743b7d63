"""Ranges of an advice, for people."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from flexd.core import units

if TYPE_CHECKING:
    from flexd.simulate.advice import Range


def hours(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else units.UNKNOWN


def in_range(given: Range, form: Callable[[float], str]) -> str:
    """``2 s (1 s to 3 s)``."""
    return f"{form(given.expected)} ({form(given.low)} to {form(given.high)})"
