from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.server import rate
from flexd.server.rate import RateLimiter, client_address


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.floats(0, 3), st.sampled_from("ab")), max_size=80), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_no_client_gets_more_than_its_burst_and_rate(requests: list[tuple[float, str]], burst: int) -> None:
    clock = Clock()
    limiter = RateLimiter(2.0, burst, clock)
    allowed: dict[str, list[float]] = {"a": [], "b": []}
    for pause, client in requests:
        clock.now += pause
        wait = limiter.wait_seconds(client)
        if wait == 0:
            allowed[client].append(clock.now)
        else:
            assert 0 < wait <= 0.5
    for times in allowed.values():
        for first in range(len(times)):
            for last in range(first, len(times)):
                assert last - first + 1 <= burst + 2.0 * (times[last] - times[first]) + 1e-6


def test_who_waits_as_told_is_let_in_and_others_are_not_kept_waiting() -> None:
    clock = Clock()
    limiter = RateLimiter(4.0, 2, clock)
    assert [limiter.wait_seconds("a") for _ in range(3)] == [0.0, 0.0, 0.25]
    assert limiter.wait_seconds("b") == 0.0
    clock.now += 0.25
    assert limiter.wait_seconds("a") == 0.0


def test_asking_too_early_makes_nobody_wait_longer() -> None:
    clock = Clock()
    limiter = RateLimiter(0.5, 1, clock)
    assert limiter.wait_seconds("a") == 0.0
    for left in (2.0, 1.5, 1.0, 0.5):
        assert limiter.wait_seconds("a") == left
        clock.now += 0.5
    assert limiter.wait_seconds("a") == 0.0


def test_the_table_of_clients_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate, "MAX_CLIENTS", 10)
    limiter = RateLimiter(1.0, 1, Clock())
    for client in range(1000):
        limiter.wait_seconds(str(client))
    assert len(limiter._buckets) == 10
    assert limiter.wait_seconds("999") > 0


def test_who_keeps_asking_is_not_forgotten_for_newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate, "MAX_CLIENTS", 10)
    limiter = RateLimiter(1.0, 1, Clock())
    limiter.wait_seconds("busy")
    for client in range(100):
        limiter.wait_seconds(str(client))
        assert limiter.wait_seconds("busy") > 0


@pytest.mark.parametrize(
    ("peer", "known_by"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("2001:db8:1:2:aaaa::1", 1), "2001:db8:1:2::/64"),
        (("2001:db8:1:2:bbbb::9", 2), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1), "fe80::/64"),
        (("", 0), "local"),
        (None, "local"),
    ],
)
def test_a_client_is_known_by_its_address(peer: tuple[str, int] | None, known_by: str) -> None:
    assert client_address(peer) == known_by
