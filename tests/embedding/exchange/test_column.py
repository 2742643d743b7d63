"""Rows of several columns, packed into one message for each peer and unpacked again."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.embedding.exchange.column import (
    Column,
    ReceivedRows,
    add_columns,
    copy_columns,
    joined_columns,
    pack,
    unpack,
    whole_columns,
)

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def bytes_of(columns: list[Column], peer: int, me: int) -> int:
    return 0 if peer == me else sum(column.sent[peer] * column.row_bytes for column in columns)


def received_of(parts: list[torch.Tensor], me: int) -> ReceivedRows:
    pieces = [part if peer == me else part.view(-1).view(torch.uint8) for peer, part in enumerate(parts)]
    return ReceivedRows(pieces, me, [len(part) for part in parts], torch.float32)


@settings(max_examples=60, deadline=None)
@given(
    peers=st.integers(1, 4), widths=st.lists(st.integers(1, 5), min_size=1, max_size=3), seed=st.integers(0, 10_000)
)  # fmt: skip
def test_each_peer_receives_the_rows_that_were_sent_to_it(peers: int, widths: list[int], seed: int) -> None:
    """Every rank packs and unpacks; odd widths leave parts unaligned."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4, (len(widths), peers, peers))  # column, from, to
    wires = [DTYPES[rng.integers(len(DTYPES))] for _ in widths]
    sources = [
        [torch.from_numpy(rng.integers(-8, 8, (6, width)).astype(np.float64)) for width in widths] for _ in range(peers)
    ]
    indices = [
        [torch.from_numpy(rng.integers(0, 6, int(of_column[rank].sum()))) for of_column in counts]
        for rank in range(peers)
    ]
    packed = []
    for rank in range(peers):
        columns = [
            Column(sources[rank][c], indices[rank][c], counts[c][rank].tolist(), counts[c][:, rank].tolist(), wires[c])
            for c in range(len(widths))
        ]
        sizes = [bytes_of(columns, peer, rank) for peer in range(peers)]
        buffer, own = pack(columns, rank)
        packed.append((columns, own, torch.split(buffer, sizes)))
    for rank, (columns, own, _) in enumerate(packed):
        arrived = torch.cat([messages[rank] for _, _, messages in packed])
        received = unpack(columns, own, arrived, rank)
        together = whole_columns(received, [torch.float64] * len(received))
        totals = [torch.zeros(3, width, dtype=torch.float64) for width in widths]
        places = [torch.from_numpy(rng.integers(0, 3, sum(rows.counts))) for rows in received]
        add_columns(received, totals, places)
        for c, rows in enumerate(received):
            whole = []
            for peer in range(peers):
                first = int(counts[c][peer][:rank].sum())
                expected = sources[peer][c][indices[peer][c][first : first + int(counts[c][peer][rank])]]
                whole.append(expected)
            joined = torch.cat(whole)
            assert rows.counts == [len(part) for part in whole]
            assert torch.equal(rows.whole(torch.float64), joined)
            assert torch.equal(together[c], joined)
            assert torch.equal(totals[c], torch.zeros_like(totals[c]).index_add_(0, places[c], joined))
            copied = torch.zeros_like(joined)
            copy_columns([rows], [copied], [torch.arange(len(joined)).flip(0)])
            assert torch.equal(copied.flip(0), joined)
            ahead = torch.ones(2, widths[c], dtype=wires[c])
            assert torch.equal(joined_columns([rows], ahead=[ahead])[0].double()[2:], joined)


def test_received_rows_are_added_in_the_order_of_the_peers_and_the_own_ones_last() -> None:
    """1 is lost beside 2^24 in float32, so the sum tells the order: ((2^24 + 1) - 2^24) + 1."""
    parts = [torch.tensor([[2.0**24]]), torch.tensor([[1.0]]), torch.tensor([[1.0]]), torch.tensor([[-(2.0**24)]])]
    total = torch.zeros(2, 1)
    add_columns([received_of(parts, 1)], [total], [torch.tensor([1, 1, 1, 1])])
    assert total.flatten().tolist() == [0.0, 1.0]
