"""The prediction that ``tools.bench advise`` holds against measured steps uses the very batches of the ranks."""

from __future__ import annotations

from tools.bench.cases.advise import batch_accesses
from tools.bench.workloads import Setting, batches_of, keys_of

SMALL = Setting(rows=4_000, dim=16, samples=16, length=10, batches=8)


def test_the_accesses_are_the_batches_of_each_rank() -> None:
    accesses = batch_accesses(SMALL)
    assert accesses.steps == 8
    for rank, keys in enumerate(accesses.passes(3)[0]):
        assert (keys == keys_of(SMALL, batches_of(SMALL, rank)[3])).all()
