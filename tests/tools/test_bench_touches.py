"""The benchmark of touches predicts the bytes of steps that it did not count, from the steps between them."""

from __future__ import annotations

import pytest
from bench_touches import LINKS, make_steps, plan_case, split, tables_of

from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.planner.model.row_bytes import Exchange
from flexd.simulate.byte_counter import ALL_TO_ALL_PARTS, INTER, INTRA, SYNC_PARTS, StepByteCounter, sent_bytes
from flexd.simulate.step_keys import StepPasses
from flexd.stream.sample_kinds import SampleKind
from flexd.stream.trace import synthetic_trace

LAYOUT = RankLayout(2, 2)


@pytest.mark.parametrize("kind", [SampleKind.SEQUENCES, SampleKind.IMPRESSIONS])
def test_bytes_of_the_other_steps_are_predicted(kind: SampleKind) -> None:
    trace = synthetic_trace(60_000)
    counted, trained = split(make_steps(trace, kind, 4, 16, 40), 0)
    case, predictions, plan = plan_case("shop", counted, trained, tables_of(trace), LAYOUT)
    assert plan["node_rows"] + plan["device_rows"] > 0
    counter = StepByteCounter(KeySpace(case.tables), LAYOUT)
    sent = sum(
        sent_bytes(counter.step(StepPasses.of([keys], LAYOUT), case.placement, Exchange.CHAIN), 4).mean(axis=0)
        for keys in case.steps
    ) / len(case.steps)  # fmt: skip
    for link, at in (("intra", INTRA), ("inter", INTER)):
        measured = float(sent[[*ALL_TO_ALL_PARTS, *SYNC_PARTS], at].sum())
        assert link in LINKS
        assert predictions["measured"][link] == pytest.approx(measured, rel=0.03)
        assert predictions["same_steps"][link] == pytest.approx(measured, rel=0.02)
        assert predictions["half_listed"][link] == pytest.approx(measured, rel=0.05)


def test_every_split_divides_the_steps_in_halves_of_its_own():
    steps = [[number] for number in range(8)]
    counted = [[step[0] for step in split(steps, number)[0]] for number in range(4)]
    assert counted == [[0, 2, 4, 6], [1, 3, 5, 7], [0, 1, 4, 5], [2, 3, 6, 7]]
    assert all(sorted([*half, *rest]) == steps for half, rest in (split(steps, number) for number in range(4)))
