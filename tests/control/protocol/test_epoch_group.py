"""Digests and sizes of the rows of a message."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from flexd.control.protocol.epoch_group import MAX_ROWS, EpochGroup, delta_tiers, rows_sha256
from flexd.core.errors import ControlError
from flexd.core.placement import Delta


def test_the_digest_is_of_little_endian_keys_then_tiers() -> None:
    keys, tiers = np.array([1, 258], np.int64), np.array([0, 2], np.uint8)
    wire = b"\x01" + bytes(7) + b"\x02\x01" + bytes(6) + b"\x00\x02"
    assert rows_sha256(keys, tiers) == hashlib.sha256(wire).hexdigest()
    assert rows_sha256(keys[::-1], tiers) != rows_sha256(keys, tiers)


def test_old_tiers_stand_before_new_tiers() -> None:
    delta = Delta(np.array([4, 5], np.int64), np.array([0, 1], np.uint8), np.array([2, 0], np.uint8))
    assert delta_tiers(delta).tolist() == [0, 1, 2, 0]
    assert delta_tiers(delta).dtype == np.uint8


@pytest.mark.parametrize(("rows", "tiers"), [(-1, 0), (MAX_ROWS + 1, 0), (0, -1), (0, 2 * MAX_ROWS + 1)])
def test_no_memory_is_allocated_for_a_message_of_too_many_rows(rows: int, tiers: int) -> None:
    with pytest.raises(ControlError, match="rows in one message"):
        EpochGroup._empty(rows, tiers)
