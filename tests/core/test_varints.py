"""Varints against the definition of LEB128, number by number."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexd.core.errors import StreamError
from flexd.core.tap_counts import VARINT_BYTES, from_varints, to_varints

NUMBERS = st.lists(st.one_of(st.integers(0, 127), st.integers(0, 2**14), st.integers(0, 2**63 - 1)), max_size=40)


def leb128(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


@given(numbers=NUMBERS)
def test_bytes_equal_the_definition_and_decode_to_the_numbers(numbers: list[int]) -> None:
    values = np.array(numbers, np.int64)
    body = to_varints(values)
    assert body == b"".join(leb128(number) for number in numbers)
    assert from_varints(body, len(numbers)).tolist() == numbers


@given(body=st.binary(max_size=40), count=st.integers(0, 40))
def test_bytes_that_are_not_so_many_numbers_are_refused(body: bytes, count: int) -> None:
    ends = [place for place, byte in enumerate(body) if byte < 128]
    lengths = np.diff([-1, *ends])
    whole = len(ends) == count and (not body or body[-1] < 128) and not any(lengths > VARINT_BYTES)
    if whole:
        assert len(from_varints(body, count)) == count
    else:
        with pytest.raises(ValueError, match="number"):
            from_varints(body, count)


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(StreamError):
        to_varints(np.array([3, -1], np.int64))
