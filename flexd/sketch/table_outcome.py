"""The fate of a table when saved sketches are restored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["kept", "emptied", "new", "removed"]
OUTCOMES: tuple[Outcome, ...] = ("kept", "emptied", "new", "removed")


@dataclass(frozen=True)
class TableOutcome:
    """The fate of one table when saved sketches are restored.

    Attributes:
        table: name.
        outcome: ``kept`` as it was, ``emptied`` because its counters are others now, ``new`` (not in the saved state)
            or ``removed`` (not configured any more).
        accesses: accesses counted in the saved state.
        detail: what changed, or why the table starts empty; "" if nothing did.
    """

    table: str
    outcome: Outcome
    accesses: int
    detail: str = ""

    @property
    def lost(self) -> int:
        """Accesses whose counts are not continued."""
        return self.accesses if self.outcome in ("emptied", "removed") else 0
