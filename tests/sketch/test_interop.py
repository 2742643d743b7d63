"""Images that the DataSketches library reads, with the same answers, and back."""

from __future__ import annotations

import datasketches
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import SketchError
from flexd.core.keyspace import TableSpec
from flexd.sketch import interop
from flexd.sketch.counters import hashing
from flexd.sketch.counters.countmin import BLOCK_IDS, CountMin
from flexd.sketch.distinct import RELATIVE_STANDARD_ERROR, DistinctRows
from flexd.sketch.table_set import SketchSet

ROWS = 100_000


def counted(ids: np.ndarray, *, log2_width: int = 9, conservative: bool = False) -> tuple[CountMin, DistinctRows]:
    counter, distinct = CountMin(ROWS, log2_width, conservative=conservative), DistinctRows()
    counter.add(ids, 0, 1, distinct.registers, 2**62, np.empty(BLOCK_IDS, dtype=np.int64), 0)
    return counter, distinct


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, ROWS - 1), max_size=400))
def test_plain_counters_and_registers_are_those_of_the_library(ids):
    counter, distinct = counted(np.array(ids, dtype=np.int64))
    theirs = datasketches.count_min_sketch(4, 512)
    hll = datasketches.hll_sketch(12, datasketches.tgt_hll_type.HLL_8)
    for row in ids:
        theirs.update(row)
        hll.update(row)
    assert interop.count_min_image(counter) == theirs.serialize()
    assert np.array_equal(interop.read_distinct(hll.serialize_compact()).registers, distinct.registers)


def test_registers_of_many_rows_are_those_of_the_library():
    ids = np.arange(50_000, dtype=np.int64)
    _, distinct = counted(ids)
    hll = datasketches.hll_sketch(12, datasketches.tgt_hll_type.HLL_8)
    for row in ids.tolist():
        hll.update(row)
    image = hll.serialize_updatable()
    assert image[40 : 40 + 4096] == distinct.registers.tobytes()
    read = datasketches.hll_sketch.deserialize(interop.distinct_image(distinct))
    assert abs(read.get_estimate() / 50_000 - 1) < 4 * RELATIVE_STANDARD_ERROR
    assert abs(read.get_estimate() / distinct.estimate() - 1) < 0.01
    assert np.array_equal(interop.read_distinct(interop.distinct_image(distinct)).registers, distinct.registers)
    assert datasketches.hll_sketch.deserialize(interop.distinct_image(DistinctRows())).is_empty()


def test_constants_are_what_the_generator_of_the_library_gives():
    state, mask = hashing.SEED, 2**64 - 1

    def step() -> int:
        nonlocal state
        state = state * 16807 % 2147483647
        return state - 1

    def uniform() -> int:
        # libstdc++ builds a 64-bit number of base-(2^31 - 2) digits, and draws again where they wrap.
        base = 2147483646
        while True:
            top = _scaled(mask // base, base, step)
            number = (base * top & mask) + step()
            if number <= mask:
                return number

    assert tuple(uniform() for _ in range(4)) == hashing._SPREAD


def _scaled(most: int, base: int, step) -> int:
    if most > base - 1:
        while True:
            number = base * _scaled(most // base, base, step) + step()
            if number <= most:
                return number
    scale = (base - 1) // (most + 1)
    while True:
        drawn = step()
        if drawn < (most + 1) * scale:
            return drawn // scale


@pytest.mark.parametrize("half_life", [None, 100.0])
@pytest.mark.parametrize("conservative", [True, False])
def test_an_exported_table_answers_as_flexd_does(half_life, conservative):
    sketches = SketchSet(
        [TableSpec("t", 2**20, 4)], 2**20, half_life, 1e9, 100, conservative=conservative, logarithmic=False
    )
    random = np.random.default_rng(2)
    for i in range(20):
        rows = random.zipf(1.3, 3000) % 2**20
        sketches.ingest("t", rows, 0, 1.7e9 + 10 * i, np.array([i + 1]))
    image = interop.export_table(sketches, "t", "count-min")
    theirs = datasketches.count_min_sketch.deserialize(image)
    asked = np.arange(500)
    answers = sketches.query("t", asked)
    assert [theirs.get_estimate(row) for row in asked.tolist()] == answers.tolist()
    assert theirs.total_weight == pytest.approx(sketches.profile().tables[0].weight)
    counter, unit_weight = interop.read_count_min(image, 2**20)
    back = counter.query(asked) * unit_weight
    assert (back >= answers).all()
    assert np.allclose(back, answers, atol=2.0**-15)
    if half_life is None:
        assert back.tolist() == answers.tolist()
    lengths = datasketches.kll_floats_sketch.deserialize(interop.export_table(sketches, "t", "lengths"))
    assert lengths.n == 20
    found = datasketches.hll_sketch.deserialize(interop.export_table(sketches, "t", "distinct")).get_estimate()
    assert found == pytest.approx(
        interop.read_distinct(interop.export_table(sketches, "t", "distinct")).estimate(), rel=0.02
    )


def test_what_a_table_does_not_have_is_named():
    sketches = SketchSet([TableSpec("t", 100, 4)], 2**20, None)
    for kind in ("count-min", "distinct", "lengths"):
        with pytest.raises(SketchError) as error:
            interop.export_table(sketches, "t", kind)
        assert error.value.remedy
    with pytest.raises(SketchError, match="unknown table"):
        interop.export_table(sketches, "u", "lengths")


def test_images_of_other_kinds_and_cut_ones_are_refused():
    counter, distinct = counted(np.arange(1000, dtype=np.int64))
    image = interop.count_min_image(counter)
    other_seed = datasketches.count_min_sketch(4, 512, 1).serialize()
    other_shape = datasketches.count_min_sketch(3, 500).serialize()
    negative = image[:32] + np.float64(-1).tobytes() + image[40:]
    for bad in (b"", image[:-1], image + b"0", other_seed, other_shape, negative, interop.distinct_image(distinct)):
        with pytest.raises(SketchError):
            interop.read_count_min(bad, ROWS)
    for bad in (b"", image, interop.distinct_image(distinct)[:-1]):
        with pytest.raises(SketchError):
            interop.read_distinct(bad)
    assert interop.read_count_min(interop.count_min_image(CountMin(10, 8)), 10)[0].total_units == 0
