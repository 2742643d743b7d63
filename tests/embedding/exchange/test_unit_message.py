"""Messages that are packed and taken apart in units: the same rows as those joined part by part."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.embedding import devices
from flexd.embedding.exchange.column import Column, joined_columns
from flexd.embedding.exchange.unit_message import UnitColumns, UnitRows

CPU = torch.device("cpu")
KINDS = [
    (torch.float32, torch.float32), (torch.float64, torch.float32), (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16), (torch.int64, torch.int64), (torch.uint8, torch.uint8),
]  # fmt: skip
"""(dtype of the rows, dtype of the wire)."""


def received_by(rank: int, columns: list[list[Column]]) -> list[UnitRows]:
    """Exchange the columns of all ranks through the messages of ``UnitColumns``."""
    packed = [UnitColumns(of_rank, me, devices.Numbers(CPU)) for me, of_rank in enumerate(columns)]
    messages = [torch.split(one.pack(), one.sent) for one in packed]
    arrived = torch.cat([of_peer[rank] for of_peer in messages])
    assert [len(of_peer[rank]) for of_peer in messages] == packed[rank].received
    received = packed[rank].unpack(torch.cat([arrived, torch.zeros(packed[rank].room, dtype=torch.uint8)]))
    return [rows for rows in received if isinstance(rows, UnitRows)]


@settings(max_examples=150, deadline=None)
@given(
    peers=st.integers(1, 4), seed=st.integers(0, 2**32), indexed=st.booleans(),
    columns=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4, 8, 17, 32]), st.sampled_from(KINDS), st.booleans(), st.integers(0, 2)),
        min_size=1, max_size=5,
    ),
)  # fmt: skip
def test_each_peer_receives_the_rows_that_were_sent_to_it(
    peers: int, seed: int, indexed: bool, columns: list[tuple[int, tuple[torch.dtype, torch.dtype], bool, int]]
) -> None:
    """Widths of one or two classes, rows that a rank keeps because the wire would round them, rows ahead, and columns
    that are added up beside others that are not."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4, (len(columns), peers, peers))  # column, from, to
    sources = [
        [torch.from_numpy(rng.integers(0, 9, (12, width))).to(dtype) for width, (dtype, _), _, _ in columns]
        for _ in range(peers)
    ]
    indices = [
        [torch.from_numpy(rng.integers(0, 12, int(counts[c][rank].sum()))) for c in range(len(columns))]
        for rank in range(peers)
    ]
    of_ranks = [
        [
            Column(
                sources[rank][c] if indexed else sources[rank][c][indices[rank][c]],
                indices[rank][c] if indexed else None,
                counts[c][rank].tolist(), counts[c][:, rank].tolist(), wire, added=added, ahead=ahead,
            )
            for c, (_, (_, wire), added, ahead) in enumerate(columns)
        ]
        for rank in range(peers)
    ]  # fmt: skip
    me = int(rng.integers(peers))
    received = received_by(me, of_ranks)
    for rows, (width, (_, wire), _, ahead) in zip(received, columns, strict=True):
        assert rows.counts == [int(counts[rows.column][peer][me]) for peer in range(peers)]
        rows.rows_ahead.copy_(torch.full((ahead, width), 5).to(wire))
    for added in (False, True):
        chosen = [rows for rows, column in zip(received, columns, strict=True) if column[2] == added]
        joined = joined_columns(chosen, own_last=added) if chosen else []
        for rows, found in zip(chosen, joined, strict=True):
            order = [*(peer for peer in range(peers) if peer != me), me] if added else list(range(peers))
            expected = [torch.full((columns[rows.column][3], rows.width), 5.0)]
            for peer in order:
                first = int(counts[rows.column][peer][:me].sum())
                index = indices[peer][rows.column][first : first + int(counts[rows.column][peer][me])]
                expected.append(sources[peer][rows.column][index].double())
            assert torch.equal(found.double(), torch.cat([part.double() for part in expected]))


def test_an_index_is_small_beside_rows_of_many_bytes() -> None:
    """Bits of copied rows and state of single numbers travel with rows: these move in units of their own size."""
    rows, narrow = [100] * 64, [3] * 64
    index = torch.arange(sum(rows))
    columns = [
        Column(torch.zeros(sum(rows), 64), index, rows, rows, torch.float32),
        Column(torch.zeros(sum(narrow), 1, dtype=torch.int64), None, narrow, narrow, torch.int64),
        Column(torch.zeros(sum(narrow), 1), None, narrow, narrow, torch.float32),
    ]
    packed = UnitColumns(columns, 0, devices.Numbers(CPU))
    places = sum(each.nbytes for each in (*packed._message._packing, *packed._message._taking))
    assert places < 0.2 * sum(packed.sent)
