"""The host waits for an accelerator's collectives with a deadline, and names the ranks that it waits for."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flexd.core.errors import CollectiveError
from flexd.core.placement import RankLayout
from flexd.embedding.exchange.collectives import DeviceWait, Peers, Traffic
from flexd.embedding.exchange.waits import Waits
from tests.support.pretended_cuda import DEVICE, PretendedCuda


class _Work:
    """A collective that the device has run once ``done`` returns true."""

    def __init__(self, done: Callable[[], bool]) -> None:
        self.is_completed = done
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


class _Notices:
    def __init__(self, found: str | None) -> None:
        self.found = found
        self.issued: dict[str, int] = {}

    def exchange_waits(self, *_: object) -> None:
        """The store cannot be reached."""

    def find(self) -> str | None:
        return self.found


def _peers(seconds: float, found: str | None = None) -> Peers:
    notices: Any = _Notices(found)
    clock = iter(range(10**6))
    wait = DeviceWait(timedelta(seconds=seconds), notices, clock=lambda: float(next(clock)))
    return Peers(None, [0, 1, 3], 1, RankLayout(2, 2), Traffic(), notices, wait, Waits(notices, 1, "main"))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_rank_that_is_gone_is_named_before_the_watchdog_ends_the_process(dtype: torch.dtype) -> None:
    hung = _Work(lambda: False)
    with PretendedCuda().running(), mock.patch.object(dist, "all_to_all_single", return_value=hung):
        sent = torch.zeros(3, dtype=dtype, device=DEVICE)
        peers = _peers(60)
        read = partial(peers.all_to_all, sent, [1, 1, 1], [1, 1, 1])
        if dtype == torch.float32:
            read()  # rows: only the device waits, until the host reads something
            read = peers.finish_on_device  # type: ignore[assignment]
        with pytest.raises(CollectiveError, match="rank 1: all_to_all with ranks 0, 3: not done") as error:
            read()
    assert "restart the job from a checkpoint" in error.value.remedy
    assert hung.waits == 1


def test_the_error_of_another_rank_is_raised_while_the_device_waits() -> None:
    hung = _Work(lambda: False)
    with PretendedCuda().running(), mock.patch.object(dist, "all_reduce", return_value=hung):
        numbers = torch.ones(2, dtype=torch.int64, device=DEVICE)
        peers = _peers(10**6, "rank 3 has no memory")
        with pytest.raises(CollectiveError, match="rank 3 has no memory"):
            peers.all_reduce(numbers)


def test_a_late_collective_is_waited_for() -> None:
    answers = iter([False, False, False, True])
    work = _Work(lambda: next(answers))
    with PretendedCuda().running(), mock.patch.object(dist, "all_reduce", return_value=work):
        peers = _peers(60)
        peers.all_reduce(torch.ones(2, dtype=torch.int64, device=DEVICE))
        peers.finish_on_device()
    assert next(answers, None) is None
