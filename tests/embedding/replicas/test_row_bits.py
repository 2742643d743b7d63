"""Sets of rows, compared with Python's sets."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.embedding.replicas import touched_rows as row_bits

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
def test_sets_of_rows_are_sets(a: list[int], b: list[int]) -> None:
    first, second = bits_of(a), bits_of(b)
    assert row_bits.positions_of(first).tolist() == sorted(set(a))
    assert row_bits.positions_of(first, 1, 3).tolist() == sorted(n for n in set(a) if 64 <= n < 3 * 64)
    assert row_bits.positions_of(row_bits.union_of([first, second, first])).tolist() == sorted({*a, *b})
    without = first & (1 - second)
    assert row_bits.positions_of(without, 0, BLOCKS).tolist() == sorted(set(a) - set(b))
    sent = row_bits.packed(first)
    expected = [sum(1 << n % 64 for n in set(a) if n // 64 == block) for block in range(BLOCKS + 1)]
    assert [word % 2**64 for word in sent.tolist()] == expected
    assert torch.equal(row_bits.unpacked(sent, WEIGHTS), first)
