"""The steps of a training that a sample takes: the same ones wherever it is asked, without agreement."""

from __future__ import annotations


def is_sampled(number: int, every: int) -> bool:
    """Return whether the step is in the sample of one in ``every``.

    Samples are nested: what a larger ``every`` takes, a smaller one takes too. Numbers are multiplied by the golden
    ratio, so that no period of the training, such as its micro-batches, meets the sampled numbers.
    """
    return (number * 0x9E3779B97F4A7C15) % 2**64 < 2**64 // every
