"""The admin API through a real uvicorn."""

from __future__ import annotations

import socket

import httpx
import pytest

from flexd.api.affinity import UserNodePage
from flexd.api.errors import ErrorBody, ProbeResult
from flexd.api.families import MAX_LABEL_VALUES
from flexd.api.plan import PlanReport
from flexd.api.status import Status
from flexd.core.errors import ApiError, ControlError, EmbeddingError, PlanError
from flexd.server import guard
from flexd.server.guard import MAX_REQUEST_BYTES
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.fake_planning import USERS


def test_every_verb_reaches_the_daemon(client, daemon):
    assert Status.model_validate(client.get("/v1/status").json()).job == "job"
    assert PlanReport.model_validate(client.post("/v1/plan").json()).replication.words == ("because",)
    replanned = client.post("/v1/replan", json={"reason": "new item launch", "wait_seconds": 2.5})
    assert (replanned.status_code, replanned.json()["outcome"]) == (200, "committed")
    assert client.post("/v1/pause", json={"reason": "maintenance", "who": "ann"}).json()["changed"] is True
    assert client.post("/v1/pause", json={}).json()["changed"] is False
    assert client.post("/v1/resume").json() == {"paused": False, "reason": None, "changed": True}
    assert client.post("/v1/resume", json={"reason": "done", "who": "ann"}).json()["changed"] is False
    assert client.post("/v1/config/reload/preview").json()["dry_run"] is True
    assert client.post("/v1/config/reload", json={"who": "ann"}).status_code == 200
    assert client.post("/v1/config/reload").status_code == 200
    assert client.post("/v1/abort/preview", json={}).json()["rollback"] is None
    assert client.post("/v1/abort/preview", json={"rollback": True}).json()["rollback"]["to_version"] == 16
    assert client.post("/v1/resume", json={"reasn": "done"}).status_code == 422
    assert daemon.calls[2:] == [
        ("replan", "new item launch", 2.5), ("pause", "maintenance", "ann"), ("pause", "requested by hand", ""),
        ("resume", "", ""), ("resume", "done", "ann"), ("preview_reload",), ("reload", "", "ann"), ("reload", "", ""),
        ("preview_abort", False), ("preview_abort", True),
    ]  # fmt: skip


@pytest.mark.parametrize(("outcome", "status"), [("accepted", 202), ("timed_out", 202), ("unchanged", 200)])
def test_a_running_replan_is_answered_with_accepted(client, daemon, outcome, status):
    daemon.outcome = outcome
    assert client.post("/v1/replan", json={}).status_code == status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ApiError("paused", status=409, remedy="resume first"), 409),
        (ApiError("odd", status=0), 500),
        (PlanError("profile is thin", remedy="wait for accesses"), 409),
        (ControlError("no ranks"), 503),
        (EmbeddingError("not from here"), 500),
    ],
)
def test_flexd_errors_keep_type_message_and_remedy(client, daemon, error, status):
    daemon.error = error
    answer = client.post("/v1/replan", json={})
    assert answer.status_code == status
    detail = ErrorBody.model_validate(answer.json()).error
    assert (detail.type, detail.message, detail.remedy) == (type(error).__name__, error.message, error.remedy)


def test_a_fault_of_the_daemon_is_a_500_without_its_text(client, daemon):
    daemon.error = ValueError("the secret is hunter2")
    answer = client.get("/v1/status")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalError"
    assert "hunter2" not in answer.text


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"wait_seconds": -1}', b'{"wait_seconds": 1e9}', b'{"wiat": 1}', b'{"reason": 3}']
)
def test_malformed_bodies_are_refused_and_reach_no_handler(client, daemon, body):
    answer = client.post("/v1/replan", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert ErrorBody.model_validate(answer.json()).error.type == "RequestError"
    assert daemon.calls == []


def test_unknown_paths_and_methods_answer_in_the_same_form(client):
    missing = client.get("/v1/nothing")
    wrong = client.get("/v1/replan")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert "error" in missing.json()
    assert wrong.headers["allow"] == "POST"


def test_large_bodies_are_refused_declared_or_not(client, daemon):
    big = b'{"reason": "' + b"x" * MAX_REQUEST_BYTES + b'"}'
    assert client.post("/v1/pause", content=big).status_code == 413
    chunked = client.post("/v1/pause", content=iter([big]), headers={"content-type": "application/json"})
    assert chunked.status_code == 413
    assert chunked.json()["error"]["type"] == "RequestTooLargeError"
    assert daemon.calls == []


def test_a_body_that_never_arrives_times_out(server, daemon, monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as raw:
        head = b"POST /v1/pause HTTP/1.1\r\nHost: localhost\r\nX-Requested-With: test\r\n"
        raw.sendall(head + b"Content-Length: 10\r\n\r\n{")
        raw.settimeout(5)
        assert raw.recv(4096).startswith(b"HTTP/1.1 408 ")
    assert daemon.calls == []


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:9464", "origin": "http://evil.example:9464"},
        {"host": "localhost.evil.example"},
        {"host": "[::1"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/pause", "/v1/replan", "/v1/resume"])
def test_web_pages_of_unknown_senders_are_refused(client, daemon, headers, path):
    answer = client.post(path, json={}, headers=headers)
    assert answer.status_code == 403
    assert answer.json()["error"]["remedy"]
    assert daemon.calls == []


def test_reading_by_a_foreign_name_is_refused_too(client):
    assert client.get("/v1/status", headers={"host": "rebound.example"}).status_code == 403


def test_own_origin_and_other_loopback_names_are_served(client, server):
    port = server.port
    assert client.post("/v1/resume", headers={"origin": f"http://127.0.0.1:{port}"}).status_code == 200
    for host in (f"localhost:{port}", f"[::1]:{port}", f"127.0.0.1:{port}"):
        assert client.get("/v1/status", headers={"host": host}).status_code == 200


def test_probes(client, daemon):
    assert (client.get("/healthz").status_code, client.get("/readyz").status_code) == (200, 200)
    daemon.useful = ProbeResult(ok=False, reasons=("no ranks",))
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"ok": False, "reasons": ["no ranks"]}
    daemon.error = RuntimeError("boom")
    answer = client.get("/healthz")
    assert answer.status_code == 503
    assert answer.json()["reasons"] == ["RuntimeError: boom"]


def test_openapi_describes_verbs_and_errors(client):
    document = client.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/status",
        "/v1/plan",
        "/v1/explain",
        "/v1/replan",
        "/v1/pause",
        "/v1/resume",
        "/v1/config",
        "/v1/config/reload",
        "/v1/config/reload/preview",
        "/v1/tables",
        "/v1/rows",
        "/v1/topology",
        "/v1/timeline",
        "/v1/affinity/users",
        "/v1/proposals",
        "/v1/proposals/{plan_id}",
        "/v1/proposals/{plan_id}/apply",
        "/v1/throttle",
        "/v1/attempts",
        "/v1/attempts/prefer",
        "/v1/attempts/forget",
        "/v1/migrations",
        "/v1/migrations/{migration_id}",
        "/v1/abort",
        "/v1/abort/preview",
        "/healthz",
        "/readyz",
        "/metrics",
    }
    assert "409" in document["paths"]["/v1/replan"]["post"]["responses"]
    lag = document["components"]["schemas"]["StreamStatus"]["properties"]["lag_messages"]
    assert lag["description"] == "Messages in the stream that are not read yet."


def test_figures_that_are_not_known_are_null():
    status = Status(job="j", version="1", stream={"source": "kafka", "messages_per_second": float("nan")})
    assert '"messages_per_second":null' in status.model_dump_json()


def test_metrics_listener_reads_only(server, daemon):
    with httpx.Client(base_url=server.metrics_address, timeout=10) as client:
        assert client.get("/metrics").status_code == 200
        assert client.get("/healthz").status_code == 200
        # Prometheus addresses a pod by its IP address, under any name.
        assert client.get("/readyz", headers={"host": "10.0.0.7:9465"}).status_code == 200
        for path in ("/v1/status", "/v1/plan", "/v1/config", "/v1/tables", "/openapi.json", "/"):
            assert client.get(path).status_code == 404
        for path in ("/v1/pause", "/v1/replan", "/v1/resume"):
            assert client.post(path, json={}).status_code == 403
            assert client.post(path, json={}, headers=COMMAND_HEADERS).status_code == 404
    assert daemon.calls == [("status",), ("ranks", 0, MAX_LABEL_VALUES)], "the scrape alone"


def test_garbage_on_the_wire_does_not_stop_the_server(client, server):
    for garbage in (
        b"\x16\x03\x01" + bytes(range(256)),
        b"GET / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as raw:
            raw.sendall(garbage)
            raw.shutdown(socket.SHUT_WR)
            raw.settimeout(5)
            raw.recv(4096)
    assert client.get("/healthz").status_code == 200


def test_users_and_their_nodes_are_read_in_pages(client, daemon):
    page = UserNodePage.model_validate(client.get("/v1/affinity/users", params={"offset": 2, "limit": 2}).json())
    assert page.ids == USERS[2:4]
    assert daemon.calls == [("user_nodes", 2, 2)]
    for wrong in ({"limit": 0}, {"limit": 10**6}, {"offset": -1}):
        assert client.get("/v1/affinity/users", params=wrong).status_code == 422
