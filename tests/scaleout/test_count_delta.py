"""Encoding of count deltas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import ScaleOutError
from flexd.core.keyspace import TableSpec
from flexd.scaleout import count_delta
from flexd.scaleout.count_delta import OffsetRange
from flexd.sketch import frame
from flexd.sketch.sketch_set import SketchSet
from tests.support.scaleout_world import SETTINGS, count_delta_of


@given(st.lists(st.integers(0, 2**32 - 1), max_size=30), st.integers(0, 20_000), st.sampled_from(["u4", "i8", "i4"]))
@settings(max_examples=60, deadline=None)
def test_arrays_come_back_bit_by_bit(numbers: list[int], zeros: int, dtype: str) -> None:
    rng = np.random.default_rng(len(numbers) + zeros)
    array = np.zeros(zeros + len(numbers), dtype=dtype)
    at = rng.choice(len(array), len(numbers), replace=False) if len(array) else np.empty(0, np.int64)
    array[at] = np.array(numbers, dtype=np.uint64).astype(dtype)
    sent = dataclasses.replace(
        count_delta_of([1], {"p": OffsetRange(None, 3)}), arrays={"a": array, "b": array[:2].reshape(-1, 1)}
    )
    got = count_delta.decode(count_delta.encode(sent), 2**24)
    assert {name: (a.dtype, a.shape) for name, a in got.arrays.items()} == {
        "a": (array.dtype, array.shape), "b": (array.dtype, array[:2].reshape(-1, 1).shape)
    }  # fmt: skip
    assert np.array_equal(got.arrays["a"], array)
    assert (got.ranges, got.messages, got.sketch_meta) == (sent.ranges, sent.messages, sent.sketch_meta)


def test_a_large_table_with_few_accesses_is_a_small_delta() -> None:
    tables = [TableSpec("item", 10_000_000, 4)]
    sketches = SketchSet.of(tables, dataclasses.replace(SETTINGS, memory_bytes=2**26))
    assert sketches.choices()[0].kind == "dense"
    rows = np.random.default_rng(0).integers(0, 10_000_000, 100_000)
    data = count_delta.encode(count_delta_of(rows.tolist(), {"p": OffsetRange(None, 1)}, sketches))
    assert len(data) < 1_100_000
    back = count_delta.decode(data, 2**28)
    again = SketchSet.from_state(tables, sketches.settings, back.sketch_meta, back.arrays)
    everything = np.arange(10_000_000)
    assert np.array_equal(again.query("item", everything), sketches.query("item", everything))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_deltas_are_refused_and_change_nothing(data: st.DataObject) -> None:
    good = bytearray(count_delta.encode(count_delta_of([1, 2], {"p": OffsetRange(None, 3)})))
    kind = data.draw(st.sampled_from(["cut", "changed", "random"]))
    if kind == "cut":
        bad = bytes(good[: data.draw(st.integers(0, len(good) - 1))])
    elif kind == "changed":
        good[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
        bad = bytes(good)
    else:
        bad = data.draw(st.binary(max_size=200))
    with pytest.raises(ScaleOutError) as caught:
        count_delta.decode(bad, 2**24)
    assert caught.value.reason == "malformed"


def rewritten(change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return a delta as another version would write it."""
    meta, arrays = frame.decode(count_delta.encode(DELTA), "delta", "")
    change(meta)
    return b"".join(frame.encode(meta, arrays))


DELTA = count_delta_of([1, 2], {"p": OffsetRange(None, 3)})


def test_a_delta_of_a_neighbouring_version_is_read() -> None:
    def change(meta: dict[str, Any]) -> None:
        meta |= {"device": ["gpu"], "messages": {**meta["messages"], "more": 1}}
        meta["messages"]["accesses"]["throttled"] = 4
        del meta["messages"]["accesses"]["late"], meta["partitions"], meta["leaving"], meta["lag_messages"]

    got = count_delta.decode(rewritten(change), 2**24)
    assert (got.ranges, got.messages, got.sketch_meta) == (DELTA.ranges, DELTA.messages, DELTA.sketch_meta)
    assert (got.partitions, got.lag_messages, got.leaving) == ((), 0, False)


@pytest.mark.parametrize(("written", "older"), [(count_delta.FORMAT + 1, "leader"), (0, "follower")])
def test_a_delta_of_another_format_is_refused_with_both_formats_and_the_side_to_upgrade(
    written: int, older: str
) -> None:
    data = rewritten(lambda meta: meta.update(delta=written))
    with pytest.raises(ScaleOutError, match=f"format {written}.* reads 1 to 1 - upgrade the {older}") as caught:
        count_delta.decode(data, 2**24)
    assert caught.value.reason == "format"


def test_a_delta_that_unpacks_to_too_much_is_refused() -> None:
    arrays = {"a": np.zeros(10_000_000, dtype=np.uint32)}
    data = count_delta.encode(dataclasses.replace(count_delta_of([1], {"p": OffsetRange(None, 3)}), arrays=arrays))
    assert len(data) < 10_000
    with pytest.raises(ScaleOutError) as caught:
        count_delta.decode(data, 39_000_000)
    assert caught.value.reason == "too_large"
