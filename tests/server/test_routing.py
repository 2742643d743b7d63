"""The limit on slow calls, and the documented errors."""

from __future__ import annotations

import threading

import httpx
import pytest

from flexd.core.errors import ApiError
from flexd.server.app import MAX_SLOW_CALLS, SlowCalls
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.until import until


def test_waits_are_bounded_and_probes_answer_meanwhile(client, daemon, server):
    daemon.hold = threading.Event()
    statuses: list[int] = []

    def wait() -> None:
        body = {"wait_seconds": 20}
        answer = httpx.post(f"{server.address}/v1/replan", json=body, headers=COMMAND_HEADERS, timeout=30)
        statuses.append(answer.status_code)

    waiting = [threading.Thread(target=wait) for _ in range(MAX_SLOW_CALLS)]
    for thread in waiting:
        thread.start()
    until(lambda: len(daemon.calls) >= MAX_SLOW_CALLS, 10)
    refused = client.post("/v1/replan", json={})
    assert refused.status_code == 429
    assert client.post("/v1/plan").status_code == 429
    assert client.get("/healthz").status_code == 200
    assert client.get("/v1/status").status_code == 200
    daemon.hold.set()
    for thread in waiting:
        thread.join(10)
    assert statuses == [200] * MAX_SLOW_CALLS
    assert client.post("/v1/plan").status_code == 200


def test_a_call_that_fails_frees_its_place() -> None:
    slow = SlowCalls(1)
    for _ in range(3):
        with pytest.raises(ValueError, match="broken"), slow.one():
            raise ValueError("broken")
    with slow.one(), pytest.raises(ApiError, match="1 plans or waits are running already") as refused, slow.one():
        pass
    assert refused.value.status == 429
