"""Divide the frames of a rank anew between its dim-groups, while it trains."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flexd.core.errors import EmbeddingError
from flexd.core.fast_memory import FRAME_BYTES
from flexd.embedding.store.store import GroupStore

LEAST_CHANGE = 0.02
"""Dim-groups keep their frames where none would have this share more or fewer: each change copies all frames of one."""


def frame_bytes(store: GroupStore) -> int:
    """Return the bytes of a frame with its state and what finds it."""
    return store.row_bytes + FRAME_BYTES


def divided(stores: Sequence[GroupStore], weights: Sequence[float]) -> list[int]:
    """Return frames by dim-group: the bytes of all frames divided in proportion to these weights, at least one each.

    Bytes that a dim-group has no rows for go to the others. Dim-groups whose home rows are all fast keep them.

    Raises:
        EmbeddingError: not one weight a dim-group, or one that is negative or not a number.
    """
    if len(weights) != len(stores) or not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise EmbeddingError(
            f"weights of fast memory {list(weights)} for {len(stores)} dim-groups", remedy="give one of at least 0 each"
        )
    frames = [store.home_rows if store.tier is None else store.tier.frames for store in stores]
    open_ones = [number for number, store in enumerate(stores) if store.tier is not None]
    left = sum(frames[number] * frame_bytes(stores[number]) for number in open_ones)
    while open_ones:
        whole = sum(weights[number] for number in open_ones)
        shares = {number: weights[number] / whole if whole > 0 else 1 / len(open_ones) for number in open_ones}
        full = [n for n in open_ones if left * shares[n] >= stores[n].home_rows * frame_bytes(stores[n])]
        if not full:
            for number in open_ones:
                frames[number] = max(1, int(left * shares[number] / frame_bytes(stores[number])))
            break
        for number in full:
            frames[number] = stores[number].home_rows
            left -= frames[number] * frame_bytes(stores[number])
        open_ones = [number for number in open_ones if number not in full]
    return frames


@torch.no_grad()
def divide_frames(stores: Sequence[GroupStore], weights: Sequence[float]) -> bool:
    """Change the frames of all dim-groups, first those that shrink; return whether anything changed. Not collective.

    The values and states of rows do not depend on it: training goes on exactly. Call it between two steps. It takes the
    time to copy the frames of the dim-groups that change, and to write back the changed rows of those that shrink. The
    frames of the one that is copied are in memory twice meanwhile.

    Raises:
        EmbeddingError: as ``divided``.
        SlowMemoryError: as ``Tier.resize``.
    """
    frames = divided(stores, weights)
    changes = [
        (count - store.tier.frames, store.tier, count)
        for store, count in zip(stores, frames, strict=True)
        if store.tier is not None
    ]
    if all(abs(more) <= LEAST_CHANGE * tier.frames for more, tier, _ in changes):
        return False
    for _, tier, count in sorted(changes, key=lambda change: change[0]):
        tier.resize(count)
    return True
