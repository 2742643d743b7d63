"""Measured effects of executed plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from flexd.api.base import FiniteOrNone, Model
from flexd.api.families import counters, gauge, with_zeros

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from flexd.operations.verification import Verifier

VerificationStateName = Literal["running", "faster", "slower", "same", "undecided", "interrupted"]


class VerificationReport(Model):
    """The verification of one migration: its step time with and without the copies of the plan."""

    migration_id: str
    """The migration of the plan."""
    state: VerificationStateName
    """``running``, the verdict, or ``interrupted``."""
    change: FiniteOrNone = None
    """Measured change of the step time by the copies, as a share; below 0 is faster. Null before the first pair."""
    low: FiniteOrNone = None
    """Lower end of its confidence interval; null while there are too few pairs."""
    high: FiniteOrNone = None
    """Upper end of its confidence interval; null while there are too few pairs."""
    pairs: int = 0
    """Pairs of blocks measured."""
    part: float = 1.0
    """Measured share of the rows that the plan promoted."""
    steps: int = 0
    """Training steps used."""
    rolled_back: bool = False
    """True if the plan was rolled back."""
    words: str = ""
    """Progress or result."""


class VerificationStatus(Model):
    """Measurement of executed plans; counters run since the daemon started."""

    enabled: bool = False
    """``planner.verify.enabled``."""
    newest: VerificationReport | None = None
    """The running verification, or the newest one; null before the first."""
    ended: dict[str, int] = Field(default_factory=dict)
    """Ended verifications by state."""
    held: tuple[str, ...] = ()
    """Reasons why kinds of plans are not carried out by the daemon itself, because one was not shown to win."""

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of verifications."""
        newest = self.newest
        yield counters("flexd_verifications", "Verifications of executed plans ended, by state.", "state", self.ended)
        yield gauge(
            "flexd_verification_change_ratio",
            "Measured change of the step time by the newest verified plan, as a share; below 0 is faster.",
            None if newest is None else newest.change,
        )
        yield gauge(
            "flexd_verification_held_kinds", "Kinds of plans held back: one was not shown to win.", len(self.held)
        )


def verification_status(verifier: Verifier | None) -> VerificationStatus:
    """Return what was measured of executed plans."""
    from flexd.operations.verification import VerificationState

    if verifier is None:
        return VerificationStatus()
    newest = verifier.newest
    ended = (state.value for state in VerificationState if state is not VerificationState.RUNNING)
    return VerificationStatus(
        enabled=verifier.settings.enabled,
        newest=None if newest is None else VerificationReport.from_object(newest),
        ended=with_zeros(ended, verifier.ended),
        held=verifier.held.reasons(),
    )
