"""Proposals and throttle over HTTP."""

from __future__ import annotations

import httpx
import pytest

from flexd.api.throttle import ThrottleStatus
from flexd.core.errors import PlanError
from tests.support.api_requests import COMMAND_HEADERS


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.address, timeout=10, headers=COMMAND_HEADERS) as client:
        yield client


@pytest.mark.parametrize(("outcome", "status"), [("committed", 200), ("accepted", 202), ("timed_out", 202)])
def test_a_proposal_is_applied(client, daemon, outcome, status):
    daemon.outcome = outcome
    body = {"reason": "go", "wait_seconds": 1.5, "force": True, "who": "ann@host"}
    answer = client.post("/v1/proposals/p7/apply", json=body)
    assert (answer.status_code, answer.json()["outcome"]) == (status, outcome)
    assert daemon.calls[0] == ("apply", "p7", "go", 1.5, True, "ann@host")


def test_an_outdated_proposal_is_a_conflict(client, daemon):
    daemon.error = PlanError("plan p7 is not executed: the placement has moved on", remedy="flexd plan")
    answer = client.post("/v1/proposals/p7/apply", json={})
    assert answer.status_code == 409
    assert "the placement has moved on" in answer.json()["error"]["message"]


def test_the_throttle_is_shown_and_changed(client, daemon):
    assert ThrottleStatus.model_validate(client.get("/v1/throttle").json()).bytes_per_step == 1 << 20
    changed = client.post("/v1/throttle", json={"bytes_per_second": 4096, "adaptive": True}).json()
    assert (changed["bytes_per_step"], changed["bytes_per_second"], changed["adaptive"]) == (1 << 20, 4096, True)
    assert daemon.calls[-1] == ("set_throttle", None, 4096, True, "", "")


@pytest.mark.parametrize(
    "body", [{"bytes_per_step": -1}, {"bytes_per_step": "many"}, {"bytes_per_hour": 1}, {"bytes_per_second": 2**51}]
)
def test_a_malformed_throttle_is_refused(client, daemon, body):
    assert client.post("/v1/throttle", json=body).status_code == 422
    assert daemon.calls == []
