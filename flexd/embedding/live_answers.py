"""The answers that the look-ups of a collection use now."""

from __future__ import annotations

from flexd.core.answers import AnswerChange, TableAnswers


class LiveAnswers:
    """Which pooled tables answer by sums. The training thread changes it between two steps, while no route is held and
    no other thread looks rows up; equal on all ranks at every look-up.

    Args:
        first: answers before any chunk.

    Attributes:
        now: answers in the applied placement.
        changes: chunks so far that have changed them.
    """

    def __init__(self, first: TableAnswers) -> None:
        self.first = self.now = first
        self.changes = 0

    def apply(self, change: AnswerChange) -> None:
        """Raises PlacementError as ``TableAnswers.after``; nothing is changed then."""
        self.now = self.now.after(change)
        self.changes += 1
