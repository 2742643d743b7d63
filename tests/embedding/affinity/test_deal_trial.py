"""Dealing pauses where steps are shorter without it: the rule, by a fake clock, and agreement of real ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import groupby

import numpy as np
import pytest

from flexd.control.protocol.report import ExchangeReason
from flexd.core.layout import RankLayout
from flexd.embedding.affinity.deal_trial import DealTrial
from flexd.embedding.exchange.exchange_choice import ExchangeChoice, ExchangeTrial
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
BLOCK = 1 + 4 + 5  # the change, steps of both ways at a depth of 1, steps that count


class Job:
    """Two ranks that read batches one step ahead; a step takes ``seconds[dealt]``."""

    def __init__(self, dealt: float, undealt: float, exchange: ExchangeTrial | None = None) -> None:
        self.seconds = {True: dealt, False: undealt}
        self.now = 0.0
        self.ranks = [
            DealTrial(
                measures=first, exchange=exchange if first else None, steps=5, interval_steps=100, longest_pause=300,
                clock=lambda: self.now,
            )
            for first in (True, False)
        ]  # fmt: skip
        self.begin_loop()

    def begin_loop(self) -> None:
        for rank in self.ranks:
            rank.begin_loop(1)

    def step(self, *, saves_bytes: bool = True) -> bool:
        """Return whether the batch is dealt that is read in this step."""
        may_deal = {rank.may_deal() for rank in self.ranks}
        assert len(may_deal) == 1, "ranks differ"
        dealt = may_deal.pop() and saves_bytes
        if dealt:
            orders = [rank.order() for rank in self.ranks]
            assert orders[1] == 0
            dealt = {rank.pause(orders[0]) for rank in self.ranks} == {True}
        self.now += self.seconds[dealt]
        for rank in self.ranks:
            rank.step(dealt=dealt)
        return dealt

    def blocks(self, steps: int, *, saves_bytes: bool = True) -> list[tuple[bool, int]]:
        """Return which steps in turn were dealt, as (dealt, how many)."""
        dealt = [self.step(saves_bytes=saves_bytes) for _ in range(steps)]
        return [(kind, len(list(of_kind))) for kind, of_kind in groupby(dealt)]


@pytest.mark.parametrize("dealt", [0.5, 1.0, 1.02])
def test_dealing_goes_on_unless_steps_are_clearly_shorter_without_and_is_measured_seldom(dealt: float) -> None:
    blocks = Job(dealt, 1.0).blocks(330)
    assert [length for kind, length in blocks if not kind] == [BLOCK] * 3
    assert [length for kind, length in blocks[2:-1] if kind] == [100, 100]


def test_dealing_stops_where_it_is_slower_and_is_tried_ever_less_often(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        blocks = Job(1.04, 1.0).blocks(1400)
    # The pause follows the block without dealing at once, and the trial ends at the header that carries the verdict.
    assert blocks[1:7] == [
        (False, BLOCK + 100),
        (True, BLOCK),
        (False, 200),
        (True, BLOCK),
        (False, 300),
        (True, BLOCK),
    ]
    assert blocks[7][0] is False
    assert blocks[7][1] == 300
    (record,) = caplog.records
    assert "100 batches: a step takes 1.04 s with dealing and 1 s without" in record.getMessage()


@pytest.mark.parametrize(("dealt", "again"), [(0.96, True), (0.98, False)])
def test_dealing_is_used_again_if_it_is_clearly_faster_by_then(
    dealt: float, again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(2.0, 1.0)
    job.blocks(60)
    job.seconds[True] = dealt
    blocks = job.blocks(150)
    assert blocks[0][0] is False
    assert blocks[1][0] is True
    assert blocks[1][1] > BLOCK if again else blocks[1][1] == BLOCK
    if again:
        job.seconds[True] = 2.0
        assert job.blocks(100)[-1][0] is False
    assert len(caplog.records) == 1, "it is said once"


def test_steps_that_were_not_dealt_to_save_bytes_are_no_trial() -> None:
    job = Job(2.0, 1.0)
    for _ in range(20):
        assert job.blocks(3) == [(True, 3)]
        assert job.blocks(20, saves_bytes=False) == [(False, 20)]


def test_a_pause_goes_on_in_the_next_loop_even_if_a_rank_left_the_last_one_earlier() -> None:
    job = Job(2.0, 1.0)
    before = job.blocks(60)
    job.ranks[1].may_deal()
    job.begin_loop()
    after = job.blocks(150)
    assert before[-1][0] is after[0][0] is False
    assert before[-1][1] + after[0][1] == BLOCK + 100


def test_a_trial_that_the_loop_ends_is_dropped() -> None:
    job = Job(2.0, 1.0)
    first, *_ = job.blocks(15)
    job.begin_loop()
    assert job.blocks(2) == [(True, 2)]
    assert first[0] is True


def test_the_trials_of_the_exchange_and_of_dealing_take_turns() -> None:
    """The first one of dealing comes after that of the exchange, and the next ones would coincide."""
    choice = ExchangeChoice("chain", ExchangeReason.START)
    exchange = ExchangeTrial(choice, steps=8, interval_steps=123, clock=lambda: job.now)
    job = Job(1.0, 1.0, exchange)
    undealt, measured = [], []
    for step in range(320):
        if not job.step():
            undealt.append(step)
            assert choice.reason is ExchangeReason.MEASURED, "the first trial is not over"
        if exchange.measures:
            measured.append(step)
        choice.agreed(choice.proposed)
        choice.name = choice.next
        exchange.step()
    assert len(undealt) == 3 * BLOCK
    assert max(measured) > undealt[BLOCK], "the exchange is not measured again"
    assert not set(undealt) & set(measured)


STEPS, SAMPLES, LOOPS = 24, 12, 2


def test_ranks_stop_and_go_on_at_the_same_step_and_train_the_same_global_batches(ranks: Ranks) -> None:
    """Where dealing is slow it stops, in the next loop too, is tried again, and stops; where it is fast it goes on."""
    layout, of_blocks = RankLayout(2, 2), {}
    plain = ranks(4).run("deal_jobs:mean_loss", layout, False, STEPS, SAMPLES, None, None, LOOPS)
    for seconds in (0.0, 10.0):
        dealt = ranks(4).run("deal_jobs:mean_loss", layout, True, STEPS, SAMPLES, None, seconds, LOOPS)
        assert all(of_rank["dealt_steps"] == dealt[0]["dealt_steps"] for of_rank in dealt), "ranks differ"
        losses, expected = (np.mean([of_rank["losses"] for of_rank in one], axis=0) for one in (dealt, plain))
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
        np.testing.assert_allclose(dealt[0]["table"], plain[0]["table"], rtol=0, atol=1e-9)
        steps = np.diff(dealt[0]["dealt_steps"]) > 0
        of_blocks[seconds] = [(bool(kind), len(list(of_kind))) for kind, of_kind in groupby(steps)]
    # Of the batch that the end of a loop takes the place of, none is dealt.
    assert of_blocks[0.0] == [(True, 8), (False, 9), (True, 6), (False, 1)] * LOOPS
    # A block and a pause, of which some is left for the next loop, and a block to compare the next one with.
    assert of_blocks[10.0] == [(True, 8), (False, 28), (True, 9), (False, 3)]
