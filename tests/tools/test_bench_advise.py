"""The prediction that ``tools.bench advise`` holds against measured steps uses the very batches of the ranks."""

from __future__ import annotations

from flexd.simulate.advice import NOW, OPTIONS
from tools.bench.cases.advise import MEASURED, PREDICTED, batch_accesses, predict
from tools.bench.workloads import Setting, batches_of, keys_of

SMALL = Setting(rows=4_000, dim=16, samples=16, length=10, batches=8)


def test_the_accesses_are_the_batches_of_each_rank() -> None:
    accesses = batch_accesses(SMALL)
    assert accesses.steps == 8
    for rank, keys in enumerate(accesses.passes(3)[0]):
        assert (keys == keys_of(SMALL, batches_of(SMALL, rank)[3])).all()


def test_a_slower_link_is_more_exchange_and_every_strategy_has_a_prediction() -> None:
    fast, slow = (predict(SMALL, rate, 1.0) for rate in (200.0, 20.0))
    assert slow.exchange_seconds > fast.exchange_seconds
    known = {option.name for option in OPTIONS}
    assert set(PREDICTED.values()) <= known
    assert MEASURED not in PREDICTED
    for option in set(PREDICTED.values()) - set(NOW):
        assert slow.options[option].saved_seconds.expected > fast.options[option].saved_seconds.expected
    assert slow.options["row_wise"].step_seconds.expected > 1.0
