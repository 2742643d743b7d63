"""A leader that cannot be reached, and requests that no follower sends."""

from __future__ import annotations

import httpx
import pytest

from flexd.core.errors import ScaleOutError
from flexd.scaleout import count_delta, signing
from flexd.scaleout.count_delta import OffsetRange
from flexd.scaleout.transport import PATH, HttpLink, listener
from tests.support.scaleout_world import LeaderProcess, MemoryStore, count_delta_of

SECRET = b"correct horse battery staple"


def test_an_unreachable_leader_is_an_error() -> None:
    with pytest.raises(ScaleOutError) as caught:
        HttpLink("127.0.0.1", 1, SECRET, attempt_seconds=2.0).offer(b"x")
    assert caught.value.reason == "unreachable"


@pytest.fixture
def leader() -> LeaderProcess:
    made = LeaderProcess(MemoryStore())
    made.open()
    return made


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"}, {"host": "evil.example:29500"}, {"host": ""}, {"host": "127.0.0.1.evil.example"},
        {"origin": "https://evil.example"}, {"origin": "null"}, {"origin": "http://127.0.0.1:29500"},
        {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"},
    ],
    ids=str,
)  # fmt: skip
def test_requests_of_browsers_and_for_other_hosts_are_refused_unread(
    leader: LeaderProcess, secret: bytes | None, headers: dict[str, str]
) -> None:
    http = listener(leader.leader, secret, "127.0.0.1", 0)
    http.start()
    try:
        data = count_delta.encode(count_delta_of([3], {"p": OffsetRange(None, 4)}))
        signed = signing.request_headers(secret, "POST", PATH, data)
        answer = httpx.post(f"{http.address}{PATH}", content=data, headers={**signed, **headers})
        assert (answer.status_code, answer.json()["reason"]) == (403, "unknown_sender")
        assert leader.ledger.positions() == {}
        assert leader.leader.followers.refused() == {"unknown_sender": 1}
        assert HttpLink("127.0.0.1", http.port, secret).offer(data).outcome == "accepted"
    finally:
        assert http.stop(5.0)


def test_beyond_loopback_followers_may_use_any_name_and_browsers_are_refused(leader: LeaderProcess) -> None:
    """The name of the leader's service is the cluster's; what a request may do is decided by its signature."""
    http = listener(leader.leader, SECRET, "0.0.0.0", 0)
    http.start()
    try:
        data = count_delta.encode(count_delta_of([3], {"p": OffsetRange(None, 4)}))
        url = f"http://127.0.0.1:{http.port}{PATH}"

        def status(headers: dict[str, str]) -> int:
            signed = signing.request_headers(SECRET, "POST", PATH, data)
            return httpx.post(url, content=data, headers={**signed, **headers}).status_code

        assert status({"host": "ranking-flexd", "origin": "http://ranking-flexd"}) == 403
        assert status({"host": "ranking-flexd", "sec-fetch-site": "same-origin"}) == 403
        assert status({"host": "ranking-flexd:29500"}) == 200
    finally:
        assert http.stop(5.0)
