"""Signed requests and the clocks that date them."""

from __future__ import annotations

import contextlib
import time

import httpx
import pytest

from flexd.core.errors import ScaleOutError
from flexd.scaleout import count_delta, push_answer, signing
from flexd.scaleout.count_delta import CountDelta, OffsetRange
from flexd.scaleout.transport import PATH, HttpLink, listener
from tests.support.scaleout_world import LeaderProcess, MemoryStore, count_delta_of

SECRET = b"correct horse battery staple"


@pytest.fixture
def leader() -> LeaderProcess:
    made = LeaderProcess(MemoryStore())
    made.open()
    return made


def _offer(leader: LeaderProcess, delta: CountDelta) -> push_answer.PushAnswer:
    return leader.leader.offer(count_delta.encode(delta))


def test_only_signed_fresh_and_new_requests_are_accepted(leader: LeaderProcess) -> None:
    http = listener(leader.leader, SECRET, "127.0.0.1", 0)
    http.start()
    try:
        data = count_delta.encode(count_delta_of([3], {"p": OffsetRange(None, 4)}))
        url = f"{http.address}{PATH}"

        def status(headers: dict[str, str], body: bytes = data) -> int:
            return httpx.post(url, content=body, headers=headers).status_code

        good = signing.request_headers(SECRET, "POST", PATH, data)
        assert status({}) == 401
        assert status(signing.request_headers(b"another", "POST", PATH, data)) == 401
        assert status(signing.request_headers(SECRET, "POST", PATH, data, unix_seconds=1.0)) == 401
        assert status(signing.request_headers(SECRET, "POST", "/v2", data)) == 401
        assert status(good, data[:-1] + b"x") == 401
        assert leader.ledger.positions() == {}
        assert status(good) == 200, "the refused request with another body did not use up its nonce"
        assert status(good) == 401, "the accepted one did"
        assert status(signing.request_headers(SECRET, "POST", PATH, data)) == 200
        assert leader.ledger.positions() == {"p": 4}
        limit, leader.leader.max_unpacked_bytes = leader.leader.max_unpacked_bytes, 10
        assert status(signing.request_headers(SECRET, "POST", PATH, data)) == 413
        leader.leader.max_unpacked_bytes = limit
        refused = {"unsigned": 1, "bad_signature": 3, "stale": 1, "replayed": 1, "too_large": 1}
        assert leader.leader.followers.refused() == refused
        with pytest.raises(ScaleOutError) as caught:
            HttpLink("127.0.0.1", http.port, b"another").offer(data)
        assert caught.value.reason in ("bad_signature", "unsigned")
        assert HttpLink("127.0.0.1", http.port, SECRET).offer(data).outcome == "repeated"
    finally:
        assert http.stop(5.0)


@pytest.mark.parametrize("wrong_seconds", [-88_371.0, 88_371.0])
def test_wrong_or_changed_clocks_delay_no_counts(
    leader: LeaderProcess, monkeypatch: pytest.MonkeyPatch, wrong_seconds: float
) -> None:
    http = listener(leader.leader, SECRET, "127.0.0.1", 0)
    http.start()
    right = time.time

    def stale() -> int:
        return leader.leader.followers.refused().get("stale", 0)

    try:
        with monkeypatch.context() as on_the_follower:
            on_the_follower.setattr(time, "time", lambda: right() + wrong_seconds)
            link = HttpLink("127.0.0.1", http.port, SECRET)
        data = count_delta.encode(count_delta_of([3], {"p": OffsetRange(None, 4)}))
        assert link.offer(data).outcome == "accepted"
        assert stale() == 1, "the refusal contains the time of the leader"
        assert link.offer(data).outcome == "repeated"
        assert stale() == 1, "the time is requested once"
        # The clocks of both are changed, and a new link is made afterwards.
        monkeypatch.setattr(time, "time", lambda: right() - wrong_seconds)
        assert link.offer(data).outcome == "repeated"
        assert stale() == 1
        assert HttpLink("127.0.0.1", http.port, SECRET).offer(data).outcome == "repeated"
        assert stale() == 2
    finally:
        assert http.stop(5.0)


def test_a_recorded_request_is_refused_after_the_clock_was_set_and_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, right = signing.RequestVerifier(SECRET), time.time
    recorded = signing.request_headers(SECRET, "POST", PATH, b"")
    verifier.check("POST", PATH, recorded, 0)
    for apart in (1e6, 0.0):
        monkeypatch.setattr(time, "time", lambda apart=apart: right() + apart)
        with contextlib.suppress(ScaleOutError):
            verifier.check("POST", PATH, signing.request_headers(SECRET, "POST", PATH, b""), 0)
    with pytest.raises(ScaleOutError) as caught:
        verifier.check("POST", PATH, recorded, 0)
    assert caught.value.reason == "replayed"
