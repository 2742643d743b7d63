"""The pause of planning and pushing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flexd.api.base import CommandRequest, Model, Reason
from flexd.api.families import counter

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class PauseRequest(CommandRequest):
    """Body of ``POST /v1/pause``."""

    reason: Reason = "requested by hand"
    """Shown in the status until ``resume``; recorded."""


class PauseState(Model):
    """The state after a pause or resume."""

    paused: bool
    """True while planning and pushing are held."""
    reason: str | None = None
    """Reason given for the pause."""
    changed: bool = True
    """False if the state was the same before."""


class DecisionsStatus(Model):
    """The file of the operators' decisions, which outlive the daemon; counters run since it started."""

    failures: int = 0
    """Writes that failed, and are tried again."""
    quarantined: int = 0
    """Files that were not usable and were quarantined."""

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of the file."""
        yield counter(
            "flexd_decisions_failures",
            "Writes of decisions to state.sqlite that failed, and are tried again.",
            self.failures,
        )
