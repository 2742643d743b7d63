"""What stream tests share: batches to send."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.stream.types import AccessBatch


@pytest.fixture
def make_batch():
    """A batch whose row ids tell its number apart."""

    def make(number: int, ids: int = 16, dtype: type = np.int32) -> AccessBatch:
        return AccessBatch("items", np.arange(ids, dtype=dtype) + number * 1000, number % 4, float(number))

    return make
