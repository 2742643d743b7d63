"""KLL quantiles."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.errors import SketchError
from flexd.sketch.quantiles import KllQuantiles


def test_an_array_is_added_value_by_value():
    lengths = KllQuantiles()
    lengths.add(np.arange(10_001, dtype=np.int32))
    assert lengths.count == 10_001
    got = lengths.quantiles([0.1, 0.5, 0.9])
    assert np.allclose(got / 10_000, [0.1, 0.5, 0.9], atol=0.013)
    twin = KllQuantiles()
    twin.load(lengths.serialized())
    assert np.array_equal(twin.serialized(), lengths.serialized())
    with pytest.raises(SketchError):
        lengths.add(np.array([["a"]]))
    with pytest.raises(SketchError):
        twin.load(lengths.serialized()[:9])
