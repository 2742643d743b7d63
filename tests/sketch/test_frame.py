"""Frames: round trip, and refusal of anything truncated, changed or of another format."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import SnapshotError, StateVersionError
from flexd.sketch import frame

META = {"text": "ü", "large": 2**60, "none": None}
ARRAYS = {
    "matrix": np.arange(12, dtype=np.uint32).reshape(3, 4),
    "empty": np.empty(0, dtype=np.int64),
    "floats": np.array([1.5, np.nan, -0.0]),
    "strided": np.arange(10, dtype=np.int32)[::2],
    "big_endian": np.arange(5, dtype=">i8"),
}


def test_a_frame_restores_values_types_and_shapes() -> None:
    meta, arrays = frame.decode(b"".join(frame.encode(META, ARRAYS)), "message", "send it again")
    assert meta == META
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].shape == array.shape
        assert arrays[name].dtype == array.dtype.newbyteorder("<")
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].flags.writeable
    assert np.signbit(arrays["floats"][2])


def test_contiguous_arrays_are_not_copied() -> None:
    *_, part = frame.encode({}, {"matrix": ARRAYS["matrix"]})
    assert np.shares_memory(np.frombuffer(part, dtype=np.uint8), ARRAYS["matrix"])


def test_truncated_and_changed_frames_are_refused_by_name() -> None:
    whole = b"".join(frame.encode(META, ARRAYS))
    for length in range(len(whole)):
        with pytest.raises(SnapshotError, match="message"):
            frame.decode(whole[:length], "message", "send it again")
    for at in range(len(whole)):
        changed = whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]
        with pytest.raises(SnapshotError) as error:
            frame.decode(changed, "message", "send it again")
        assert error.value.remedy == "send it again"
    with pytest.raises(SnapshotError):
        frame.decode(whole + b"\0", "message", "send it again")


def test_another_version_is_named() -> None:
    whole = bytearray(b"".join(frame.encode(META, {})))
    struct.pack_into("<I", whole, 8, frame.FORMAT_VERSION + 1)
    struct.pack_into("<I", whole, 32, zlib.crc32(whole[:32]))
    with pytest.raises(StateVersionError, match=f"version {frame.FORMAT_VERSION + 1} is of a newer flexd"):
        frame.decode(bytes(whole), "message", "")


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(noise: bytes) -> None:
    for data in (noise, frame.MAGIC + noise):
        with pytest.raises(SnapshotError):
            frame.decode(data, "message", "")


@pytest.mark.parametrize(
    ("meta", "arrays"),
    [
        ({}, {"object": np.array([object()])}),
        ({}, {"complex": np.zeros(2, dtype=complex)}),
        ({"object": object()}, {}),
        ({"nan": float("nan")}, {}),
    ],
)
def test_values_that_a_frame_cannot_hold_are_refused(meta: dict, arrays: dict) -> None:
    with pytest.raises(SnapshotError):
        frame.encode(meta, arrays)
