"""Errors of a guarded call, and whether ranks that wait are told of them."""

from __future__ import annotations

import pytest

from flexd.core.errors import EmbeddingError
from flexd.embedding.exchange.fault_notice import FaultNotices
from flexd.embedding.exchange.step_guard import StepGuard


class Published(FaultNotices):
    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []

    def publish(self, rank: int, error: BaseException) -> bool:
        self.errors.append(error)
        return True


@pytest.mark.parametrize(
    ("error", "told"),
    [(EmbeddingError("row 9 of items"), 0), (RuntimeError("out of memory"), 1)],
    ids=["of the input, on every rank", "of this rank"],
)
def test_ranks_that_wait_are_told_of_an_error_of_this_rank_alone(error: Exception, told: int) -> None:
    notices = Published()
    guard = StepGuard(0, notices, [])
    with pytest.raises(type(error)), guard.call(in_step=False):
        raise error
    assert notices.errors == [error] * told
    with guard.call(in_step=False):
        pass
