"""Sets of rows as words and as bytes, compared with Python's sets."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.embedding import devices
from flexd.embedding.replicas import row_bits

CPU = torch.device("cpu")
BLOCKS = 5
WEIGHTS = 2 ** torch.arange(8, dtype=torch.uint8)
members = st.lists(st.integers(0, 64 * BLOCKS - 1), max_size=80)


def bits_of(numbers: list[int]) -> row_bits.RowBits:
    bits = row_bits.none_set(64 * BLOCKS, CPU)
    row_bits.mark(bits, torch.tensor(numbers, dtype=torch.int64))
    return bits


@settings(max_examples=60, deadline=None)
@given(a=members, b=members)
@pytest.mark.parametrize("words", [True, False])
def test_sets_of_rows_are_sets(words: bool, a: list[int], b: list[int]) -> None:
    with mock.patch.object(devices, "in_host_memory", return_value=words):
        first, second = bits_of(a), bits_of(b)
        assert row_bits.positions_of(first).tolist() == sorted(set(a))
        assert row_bits.positions_of(first, 1, 3).tolist() == sorted(n for n in set(a) if 64 <= n < 3 * 64)
        assert row_bits.positions_of(row_bits.union_of([first, second, first])).tolist() == sorted({*a, *b})
        without = first & row_bits.all_others(second)
        assert row_bits.positions_of(without, 0, BLOCKS).tolist() == sorted(set(a) - set(b))
        sent = row_bits.packed(first, WEIGHTS)
        assert len(sent) == BLOCKS + 1
        assert torch.equal(row_bits.unpacked(sent, WEIGHTS), first)


def test_words_of_both_kinds_are_equal() -> None:
    """A rank with an accelerator reads what one without sends."""
    numbers = [0, 7, 8, 62, 63, 64, 200]
    sent = []
    for words in (True, False):
        with mock.patch.object(devices, "in_host_memory", return_value=words):
            sent.append(row_bits.packed(bits_of(numbers), WEIGHTS))
    assert torch.equal(*sent)
