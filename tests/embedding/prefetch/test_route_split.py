"""Splitting of a route: both halves together have its rows, and their counts are those of their rows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.embedding.exchange.hop import Agreement, CallSignature
from flexd.embedding.exchange.route import Route, StationRows
from flexd.embedding.prefetch.route_split import _exchange_bits, split_route


class _Wire:
    """An all-to-all between threads, in place of processes."""

    def __init__(self, size: int) -> None:
        self.boxes: list[list[torch.Tensor]] = [[] for _ in range(size)]
        self.barrier = threading.Barrier(size)


class _Peers:
    def __init__(self, wire: _Wire, index: int) -> None:
        self.size = len(wire.boxes)
        self.index = index
        self._wire = wire

    def all_to_all(self, send: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        self._wire.boxes[self.index] = list(torch.split(send, list(send_counts)))
        self._wire.barrier.wait(30)
        received = torch.cat([box[self.index] for box in self._wire.boxes])
        assert len(received) == sum(receive_counts)
        return received


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bits_arrive_unchanged(data: st.DataObject) -> None:
    """Exchange several columns with any numbers of bits, none included, between up to four peers."""
    size, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    counts = [
        [[data.draw(st.integers(0, 20)) for _ in range(columns)] for _ in range(size)] for _ in range(size)
    ]  # [from][to][column]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    bits = [
        [[torch.rand(counts[a][b][c], generator=generator) < 0.5 for c in range(columns)] for b in range(size)]
        for a in range(size)
    ]
    wire = _Wire(size)
    received: dict[int, list[torch.Tensor]] = {}

    def run(me: int) -> None:
        received[me] = _exchange_bits(
            _Peers(wire, me),  # type: ignore[arg-type]
            [torch.cat([bits[me][peer][c] for peer in range(size)]) for c in range(columns)],
            np.array(counts[me]),
            np.array([counts[peer][me] for peer in range(size)]),
        )

    threads = [threading.Thread(target=run, args=(me,)) for me in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for me in range(size):
        for column in range(columns):
            expected = torch.cat([bits[peer][me][column] for peer in range(size)])
            assert torch.equal(received[me][column], expected)


@pytest.mark.parametrize("expanded", [True, False])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), rows=st.integers(0, 12))
def test_the_halves_of_a_route_carry_its_rows(expanded: bool, seed: int, rows: int) -> None:
    """With one peer and two stations, the halves carry the same rows as the whole route."""
    generator = torch.Generator().manual_seed(seed)

    def station(rows: int, forwards: bool) -> StationRows:
        held = int(torch.randint(rows + 1, (1,), generator=generator)) if forwards else rows
        local = torch.arange(held)
        expand = None
        if expanded:
            expand = torch.cat([torch.randperm(rows, generator=generator)] * 2)
        return StationRows(rows, expand, held, local + 100, torch.full_like(local, -1), held)

    first = station(rows, True)
    second = station((first.rows - first.held) // (2 if expanded else 1), False)
    requests = second.rows if second.expand is None else len(second.expand)
    first = replace(first, rows=first.held + requests)
    counts = (np.array([[requests]]),)
    keys = [torch.arange(first.rows) + 500, torch.arange(requests) + 700]
    route = Route(
        ((first,), (second,)),
        counts,
        counts,
        Agreement(0, 0, CallSignature(0, 0), CallSignature(0, 0)),
        tuple((of_station,) for of_station in keys),
    )
    of_second = torch.rand(second.rows, generator=generator) < 0.5
    marks = torch.rand(first.rows, generator=generator) < 0.5
    answered = of_second if second.expand is None else of_second[second.expand]
    marks[first.held :] = answered
    halves = split_route(route, [[marks], [of_second]])
    values = torch.randn(second.rows, generator=generator)
    whole = values if second.expand is None else values[second.expand]
    total = torch.zeros(first.rows, dtype=torch.int64)
    for half, places, chosen in (
        (halves.marked, halves.marked_rows[0], marks),
        (halves.rest, halves.rest_rows[0], ~marks),
    ):
        near, far = half.stations[0][0], half.stations[1][0]
        assert near.rows == len(places) == int(chosen.sum())
        assert near.expand is None
        assert torch.equal(half.keys[0][0], keys[0][chosen])
        assert torch.equal(half.keys[1][0], keys[1][answered if half is halves.marked else ~answered])
        total[places] += 1
        assert torch.equal(places[: near.held] + 100, near.slots)
        assert half.requested[0].tolist() == half.served[0].tolist() == [[near.rows - near.held]]
        sent = values[far.slots - 100]
        sent = sent if far.expand is None else sent[far.expand]
        assert torch.equal(sent, whole[chosen[first.held :]])
        assert torch.equal(places[near.held :], first.held + chosen[first.held :].nonzero().view(-1))
    assert torch.equal(total, torch.ones_like(total))
    now, later = halves.split_rows([torch.arange(first.rows)])
    assert sorted([*now[0].tolist(), *later[0].tolist()]) == list(range(first.rows))
