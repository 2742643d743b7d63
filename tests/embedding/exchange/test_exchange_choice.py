"""The exchange changes between steps by agreement, and the faster one is kept. Training: test_any_training.py."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flexd.control.protocol.report import ExchangeReason
from flexd.embedding.exchange.exchange_choice import ExchangeChoice, ExchangeTrial


def test_the_newest_proposal_is_agreed_and_of_equal_ones_direct() -> None:
    choices = [ExchangeChoice("chain") for _ in range(3)]
    choices[0].propose("direct")
    choices[1].propose("chain")
    for choice in choices:
        choice.agreed(max(other.proposed for other in choices))
    assert [choice.next for choice in choices] == ["direct"] * 3
    assert all(choice.due for choice in choices)
    for choice in choices:
        choice.name = choice.next
    choices[2].propose("chain")
    for choice in choices:
        choice.agreed(max(other.proposed for other in choices))
    assert [(choice.next, choice.due) for choice in choices] == [("chain", True)] * 3


@pytest.mark.parametrize(
    ("direct_seconds", "kept"), [(0.5, "direct"), (0.98, "chain"), (1.5, "chain")], ids=["faster", "equal", "slower"]
)
def test_a_trial_keeps_the_exchange_that_is_clearly_faster(direct_seconds: float, kept: str) -> None:
    now = 0.0
    choice = ExchangeChoice("chain")
    trial = ExchangeTrial(choice, steps=5, interval_steps=100, clock=lambda: now)
    used = []
    for _ in range(60):
        choice.agreed(choice.proposed)
        choice.name = choice.next
        used.append(choice.name)
        now += direct_seconds if choice.name == "direct" else 1.0
        trial.step()
    assert "direct" in used
    assert used[-30:] == [kept] * 30
    assert sum(a != b for a, b in pairwise(used)) == (1 if kept == "direct" else 2)


def test_auto_begins_with_the_priced_exchange_and_keeps_the_measured_one() -> None:
    choice, now = ExchangeChoice("chain", ExchangeReason.START), [0.0]
    trial = ExchangeTrial(choice, steps=2, interval_steps=1000, clock=lambda: now[0])

    def steps(number: int) -> None:
        for _ in range(number):
            choice.agreed(choice.proposed)
            choice.name = choice.next
            now[0] += 1.0 if choice.name == "chain" else 2.0
            trial.step()

    trial.begin_with("")
    trial.begin_with("direct")
    steps(1)
    assert (choice.name, choice.reason) == ("direct", ExchangeReason.PRICED)
    steps(20)
    assert (choice.name, choice.reason) == ("chain", ExchangeReason.MEASURED)
    trial.begin_with("direct")
    steps(3)
    assert choice.name == "chain", "only the first price counts"
