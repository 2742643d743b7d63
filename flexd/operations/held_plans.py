"""Kinds of plans that the daemon does not carry out by itself, because one of them was not shown to win."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from flexd.operations.decisions import DecisionFile, HeldPlan

LONGEST_SECONDS = 86_400.0


class HeldPlans:
    """Thread-safe. Holds outlive the daemon; a hold is twice as long as the one before it of the same kind.

    A kind is released when a plan of it measures no slower. Users' plans are not held.
    """

    def __init__(self, decisions: DecisionFile) -> None:
        self._decisions = decisions

    def hold(self, kind: str, reason: str, first_seconds: float, unix_seconds: float) -> None:
        """Hold plans of this kind back for ``first_seconds``, or twice the time of the hold before."""
        before = self._of(kind)
        seconds = first_seconds if before is None else max(first_seconds, 2 * before.seconds)
        seconds = min(seconds, LONGEST_SECONDS)
        held = HeldPlan(kind=kind, reason=reason, seconds=seconds, until_unix_seconds=unix_seconds + seconds)
        self._decisions.update(held_plans=(*self._others(kind), held))

    def release(self, kind: str) -> None:
        """Release plans of this kind, and forget their back-off."""
        if self._of(kind) is not None:
            self._decisions.update(held_plans=self._others(kind))

    def reason(self, kind: str, unix_seconds: float | None = None) -> str:
        """Return why plans of this kind are held back now; empty if they are not."""
        held = self._of(kind)
        unix_seconds = time.time() if unix_seconds is None else unix_seconds
        # A clock that was set back does not extend a hold.
        left = 0.0 if held is None else min(held.until_unix_seconds - unix_seconds, held.seconds)
        if held is None or left <= 0:
            return ""
        until = datetime.fromtimestamp(held.until_unix_seconds, UTC)
        return f"{held.reason}; plans for {kind} wait until {until:%Y-%m-%d %H:%M:%S} UTC"

    def reasons(self) -> tuple[str, ...]:
        """Return the reasons of all holds in force."""
        found = (self.reason(held.kind) for held in self._decisions.current.held_plans)
        return tuple(reason for reason in found if reason)

    def _of(self, kind: str) -> HeldPlan | None:
        return next((held for held in self._decisions.current.held_plans if held.kind == kind), None)

    def _others(self, kind: str) -> tuple[HeldPlan, ...]:
        return tuple(held for held in self._decisions.current.held_plans if held.kind != kind)
