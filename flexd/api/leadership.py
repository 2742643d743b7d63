"""Who of several daemons leads, as the status tells it."""

from __future__ import annotations

from typing import Literal

from flexd.api.base import Model


class AvailabilityStatus(Model):
    """This daemon's part among those that share a lease."""

    role: Literal["leader", "standby"]
    """What it does now."""
    identity: str
    """Its name in the lease."""
    lease: str
    """Where the lease is kept."""
    term: int = 0
    """The newest term that was seen."""
    holder: str | None = None
    """Who has it; null if it was given back."""
    leadership_acquisitions: int = 0
    """Times that this process began to lead."""
    leadership_losses: int = 0
    """Times that it lost the lease while it led."""
    problem: str | None = None
    """Why the lease cannot be reached, or why this daemon could not lead."""
