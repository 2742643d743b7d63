"""Ranks agree to change arms. Training: test_any_training.py; the choice: test_tuner.py."""

from __future__ import annotations

from typing import Any

import pytest

from flexd.core.errors import EmbeddingError
from flexd.embedding.exchange.arms import AgreedArm, Arm, arms_of, wires_of


def test_the_newest_proposal_is_agreed_and_of_equal_ones_the_last_arm() -> None:
    choices = [AgreedArm("chain") for _ in range(3)]
    assert choices[0].next == Arm("chain", prefetch=True), "a loop prefetches until an arm is agreed"

    def agree() -> None:
        for choice in choices:
            choice.agreed(max(other.proposed for other in choices))

    choices[0].propose(Arm("direct", prefetch=True))
    choices[1].propose(Arm("chain", prefetch=False))
    agree()
    assert [choice.next for choice in choices] == [arms_of([""])[-1]] * 3
    assert all(choice.due for choice in choices)
    for choice in choices:
        choice.exchange = choice.next.exchange
    choices[2].propose(Arm("chain"))
    assert (choices[2].newest, choices[1].newest) == (Arm("chain"), arms_of([""])[-1])
    agree()
    assert [(choice.next, choice.due) for choice in choices] == [(Arm("chain"), True)] * 3


@pytest.mark.parametrize("given", [(), "float8", ("float32", "int8"), (None, None), ["bfloat16"] * 2])
def test_what_is_no_choice_of_wires_is_refused(given: Any) -> None:
    with pytest.raises(EmbeddingError, match="one of float32, float16, bfloat16"):
        wires_of(given)
