"""The certificate of a choice: what it may miss of the largest possible saving."""

from __future__ import annotations

_ROUNDING = 1e-12


def missed_share(objective_seconds: float, home_seconds: float, lower_bound_seconds: float) -> float:
    """Return what may be missed of the largest possible saving, 0 to 1; 0 where nothing can be saved."""
    missed, possible = max(0.0, objective_seconds - lower_bound_seconds), home_seconds - lower_bound_seconds
    # Below the rounding of the sums.
    return min(1.0, missed / possible) if possible > _ROUNDING * home_seconds else 0.0
