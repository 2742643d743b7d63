"""The status of the sketches: what the newest profile explains."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.api.stream import SketchStatus, sketch_status
from flexd.core.keyspace import TableSpec
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.table_sketch import SketchSettings

ROWS = 10**9


def status(rows: np.ndarray) -> SketchStatus:
    sketches = SketchSet([TableSpec("items", ROWS, 4)], SketchSettings(2**20, None, 1e9, 1_000, logarithmic=False))
    assert [choice.kind for choice in sketches.choices()] == ["count_min"]
    sketches.ingest("items", rows, 0, 1.7e9)
    return sketch_status(sketches.choices(), sketches.profile(), 0.0)


def gauges(shown: SketchStatus) -> dict[str, float]:
    return {sample.name: sample.value for family in shown.metrics() for sample in family.samples if not sample.labels}


def test_rows_that_noise_hides_explain_nothing_for_certain() -> None:
    shown = status(np.random.default_rng(1).integers(0, ROWS, 2_000_000))
    assert shown.profile.listed == pytest.approx(0, abs=0.05)
    assert gauges(shown)["flexd_profile_listed_ratio"] < 0.5, "FlexdProfileThin"


def test_popular_rows_explain_what_they_are() -> None:
    random = np.random.default_rng(1)
    popular = random.integers(0, 100, 900_000) * 9_999_999
    shown = status(random.permutation(np.concatenate([popular, random.integers(0, ROWS, 100_000)])))
    assert shown.profile.listed == pytest.approx(0.9, abs=0.03)
    assert gauges(shown)["flexd_profile_listed_ratio"] == shown.profile.listed
