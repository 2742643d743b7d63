"""What labels of counters can say: each value is on the metrics page at 0 before it first comes up.

``rate()`` and ``increase()`` do not see the first increment of a series that appears with it, so an alert on "any"
would miss it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flexd.control.daemon.migration_states import FINAL_STATES
from flexd.scaleout.leader import REASONS

MIGRATION_STATES = tuple(sorted(state.value for state in FINAL_STATES))
SCALE_OUT_REFUSALS = tuple(sorted(REASONS))


def with_zeros(values: Iterable[str], counts: Mapping[str, int]) -> dict[str, int]:
    """``counts``, with 0 for those of ``values`` that have not come up; others that have stay."""
    return {**dict.fromkeys(values, 0), **counts}
