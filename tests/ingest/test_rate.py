"""Rates of continuous streams, and of taps that send one message a rank and then nothing for half a minute."""

from __future__ import annotations

import pytest

from flexd.ingest.stats import RATE_SECONDS, RateMeter


@pytest.mark.parametrize("every_seconds", [0.1, 30.0])
def test_the_rate_is_that_of_the_last_window(every_seconds: float) -> None:
    meter, messages, due = RateMeter(100.0), 0, 100.0
    for tick in range(1, 4001):
        now = 100.0 + tick / 10
        while due < min(now, 300.0):
            messages, due = messages + 1, due + every_seconds
        meter.update(now, messages, 100 * messages)
        if now in (110.0, 290.0):
            assert meter.messages_per_second == pytest.approx(1 / every_seconds, rel=0.02 if now > 110.0 else 3.0)
            assert meter.accesses_per_second == pytest.approx(100 * meter.messages_per_second)
    assert now - 300.0 > RATE_SECONDS
    assert meter.accesses_per_second == 0
