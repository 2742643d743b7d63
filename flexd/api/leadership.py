"""Leadership: the lease that the daemons of one job share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from flexd.api.base import Model
from flexd.api.families import counter, gauge

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class LeadershipStatus(Model):
    """The role of this daemon among those that share a lease; counters run since it started."""

    role: Literal["leader", "standby"]
    """Its role now."""
    identity: str
    """Its name in the lease."""
    lease: str
    """Where the lease is kept."""
    term: int = 0
    """The newest term that was seen."""
    held_term: int = 0
    """Term of the lease that this daemon holds; 0 if it holds none."""
    holder: str | None = None
    """Name of the lease's holder; null if the lease was given back."""
    leadership_acquisitions: int = 0
    """Times that this process began to lead."""
    leadership_losses: int = 0
    """Times that it lost the lease while it led."""
    lease_failures: int = 0
    """Attempts that could not reach the lease."""
    problem: str | None = None
    """Reason why the lease cannot be reached, or why this daemon could not lead."""

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of leadership."""
        yield gauge("flexd_leading", "1 while this daemon leads, 0 while it stands by.", self.role == "leader")
        yield gauge("flexd_lease_term", "Term of the lease that this daemon holds; 0 if it holds none.", self.held_term)
        yield counter(
            "flexd_leadership_acquisitions", "Times that this daemon began to lead.", self.leadership_acquisitions
        )
        yield counter(
            "flexd_leadership_losses", "Times that this daemon lost the lease while it led.", self.leadership_losses
        )
        yield counter("flexd_lease_failures", "Attempts that could not reach the lease.", self.lease_failures)
