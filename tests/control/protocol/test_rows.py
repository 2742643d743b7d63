"""Digests, pieces and sizes of lists of rows."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.control.protocol import rows as module
from flexd.control.protocol.rows import MAX_ROWS, RowsAssembly, pieces_of, rows_body
from flexd.core.errors import AuthenticationError, ControlError


def sha256_of(keys: np.ndarray, tiers: np.ndarray) -> str:
    return hashlib.sha256(rows_body(keys, tiers)).hexdigest()


def test_rows_travel_as_little_endian_keys_then_tiers() -> None:
    keys, tiers = np.array([1, 258], np.int64), np.array([0, 2], np.uint8)
    wire = b"\x01" + bytes(7) + b"\x02\x01" + bytes(6) + b"\x00\x02"
    assert rows_body(keys, tiers) == wire


@settings(deadline=None)
@given(rows=st.integers(0, 40), per_row=st.integers(1, 2), piece_bytes=st.integers(1, 64), seed=st.integers(0, 99))
def test_any_list_arrives_as_it_was_cut(rows: int, per_row: int, piece_bytes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys, tiers = rng.integers(0, 2**62, rows), rng.integers(0, 3, per_row * rows).astype(np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", piece_bytes)
        body = rows_body(keys, tiers)
        pieces = pieces_of(body)
        assert all(len(piece) <= piece_bytes for piece in pieces)
        assembly = RowsAssembly(rows, per_row, sha256_of(keys, tiers))
        assert [assembly.add(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    received_keys, received_tiers = assembly.rows()
    assert np.array_equal(received_keys, keys)
    assert np.array_equal(received_tiers, tiers)
    assert received_keys.flags.writeable and received_tiers.flags.writeable  # noqa: PT018


@pytest.mark.parametrize("rows", [-1, MAX_ROWS + 1])
def test_no_memory_is_allocated_for_a_message_of_too_many_rows(rows: int) -> None:
    with pytest.raises(ControlError, match="rows in one message"):
        RowsAssembly(rows, 2, "")


@pytest.mark.parametrize("data", [b"", b"x" * 9, b"x" * 11])
def test_a_piece_of_another_length_is_refused(data: bytes) -> None:
    with pytest.raises(ControlError, match="piece 0 of a list of 1 rows"):
        RowsAssembly(1, 2, "").add(data)


def test_a_piece_after_the_last_is_refused() -> None:
    assembly = RowsAssembly(1, 2, "")
    assert assembly.add(bytes(10))
    for more in (b"", b"x"):
        with pytest.raises(ControlError, match="piece 1"):
            assembly.add(more)


def test_other_rows_than_announced_are_refused() -> None:
    keys, tiers = np.array([1], np.int64), np.array([0, 2], np.uint8)
    assembly = RowsAssembly(1, 2, sha256_of(keys, tiers))
    assembly.add(rows_body(keys, tiers[::-1]))
    with pytest.raises(AuthenticationError, match="not the rows announced"):
        assembly.rows()
