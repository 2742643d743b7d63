"""Validation of access batches."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.errors import StreamError
from flexd.stream.types import AccessBatch


@pytest.mark.parametrize(
    ("rows", "lengths"),
    [
        (np.zeros(3), None),
        (np.zeros((2, 2), dtype=np.int64), None),
        (np.zeros(3, dtype=np.int64), np.array([1, 1], dtype=np.int32)),
        (np.zeros(3, dtype=np.int64), np.array([4, -1], dtype=np.int32)),
        (np.zeros(3, dtype=np.int64), np.array([3], dtype=np.int64)),
    ],
)
def test_an_invalid_batch_cannot_be_created(rows, lengths):
    with pytest.raises(StreamError):
        AccessBatch("t", rows, 0, 0.0, lengths)
