"""Fast memory of a rank whose home rows are in two memories: bytes of a frame, and the division by rows."""

from __future__ import annotations

from collections.abc import Sequence

FRAME_BYTES = 64
"""Of a frame beside its row and state: what finds it, and its score."""


def proportional_frames(budget_bytes: float, rows: Sequence[int], frame_bytes: Sequence[int]) -> list[int]:
    """Return the frames of each dim-group, in proportion to the bytes of its rows; at least one each.

    Args:
        rows: home rows of a rank in each dim-group.
        frame_bytes: of one frame of each, with its state and ``FRAME_BYTES``.
    """
    whole = sum(n * size for n, size in zip(rows, frame_bytes, strict=True))
    share = min(1.0, budget_bytes / max(1, whole))
    return [min(n, max(1, int(n * share))) for n in rows]
