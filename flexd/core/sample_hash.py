"""Samples of training data: every publisher, rank and daemon chooses the same ones, without agreement."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

GAMMA = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


def mixed(values: npt.NDArray[np.integer[Any]]) -> UInt64Array:
    """Return uint64 [n]: the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of each value."""
    with np.errstate(over="ignore"):
        z = values.astype(np.uint64) + np.uint64(GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
        result: UInt64Array = z ^ (z >> np.uint64(31))
    return result


def mixed_one(value: int) -> int:
    """Return ``mixed`` of one number, which may be negative."""
    z = (value + GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * FIRST) & _MASK
    z = ((z ^ (z >> 27)) * SECOND) & _MASK
    return z ^ (z >> 31)


def step_base(source_rank: int, step: int) -> int:
    """Return the hash of a rank's forward pass. The i-th sample of the pass has the key ``mixed(base + i)``."""
    return mixed_one(mixed_one(step) ^ source_rank)


def entry_base(table: int, source_rank: int, event_time_bits: int) -> int:
    """Return the hash of an entry without a step number, whose samples have rows of its table alone."""
    return mixed_one(mixed_one(mixed_one(event_time_bits) ^ source_rank) ^ (table + 1))


def is_sampled(number: int, every: int) -> bool:
    """Return whether the step is in the sample of one in ``every``.

    Samples are nested: what a larger ``every`` takes, a smaller one takes too. Numbers are multiplied by the golden
    ratio, so that no period of the training, such as its micro-batches, meets the sampled numbers.
    """
    return (number * 0x9E3779B97F4A7C15) % 2**64 < 2**64 // every
