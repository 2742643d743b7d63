"""Rates of continuous streams, and of taps that send one message a rank and then nothing for a minute."""

from __future__ import annotations

import pytest

from flexd.ingest.rate import WINDOW_SECONDS, RateMeter, Totals

POLL_SECONDS = 0.1


class Stream:
    """Polls a meter like the ingest loop."""

    def __init__(self) -> None:
        self.now = 100.0
        self.totals = Totals()
        self.meter = RateMeter(self.now)

    def receive(self, messages: int, accesses: int) -> None:
        self.totals = Totals(self.totals.messages + messages, self.totals.accesses + accesses)

    def run(self, seconds: float, messages: int = 0, accesses: int = 0) -> list[float]:
        """Receive so many messages and accesses at each poll; return the access rate after each poll."""
        rates = []
        for _ in range(round(seconds / POLL_SECONDS)):
            self.now += POLL_SECONDS
            self.receive(messages, accesses)
            self.meter.update(self.now, self.totals)
            rates.append(self.meter.accesses_per_second)
        return rates


def test_a_continuous_stream_has_the_rate_of_its_last_window() -> None:
    stream = Stream()
    stream.run(10, messages=2, accesses=300)
    assert stream.meter.messages_per_second == pytest.approx(20)
    assert stream.meter.accesses_per_second == pytest.approx(3000)
    stream.run(3 * WINDOW_SECONDS, messages=1, accesses=100)
    assert stream.meter.accesses_per_second == pytest.approx(1000)
    stream.run(3 * WINDOW_SECONDS)
    assert stream.meter.accesses_per_second == 0


def test_ranks_that_send_every_thirty_seconds_have_the_mean_rate_between_messages() -> None:
    stream = Stream()
    for _ in range(4):
        for _rank in range(4):  # the messages of the four ranks are half a second apart
            stream.run(0.5)
            stream.receive(1, 30_000)
        stream.run(28)
    for _ in range(3):
        for _rank in range(4):
            rates = stream.run(0.5)
            assert rates == [pytest.approx(4 * 30_000 / 30)] * len(rates)
            stream.receive(1, 30_000)
        rates = stream.run(28)
        assert rates == [pytest.approx(4 * 30_000 / 30)] * len(rates)
    assert stream.meter.messages_per_second == pytest.approx(4 / 30)


def test_the_first_message_counts_from_the_start_and_silence_ends_the_rate() -> None:
    stream = Stream()
    stream.run(10)
    stream.receive(1, 1000)
    stream.run(WINDOW_SECONDS + 2 * POLL_SECONDS)
    assert stream.meter.accesses_per_second == pytest.approx(1000 / 10, rel=0.02)
    stream.run(30)
    assert stream.meter.accesses_per_second == 0
