"""The admin API through a real uvicorn."""

from __future__ import annotations

import httpx
import pytest

from flexd.api.base import ErrorBody, ProbeResult
from flexd.api.plan import PlanReport, UserNodePage
from flexd.api.status import DaemonStatus
from flexd.api.table import MAX_PAGE_ENTRIES, HotRowPage, TablePage
from flexd.core.errors import ApiError, ConfigError, ControlError, EmbeddingError, PlanError
from flexd.core.model import MAX_LABEL_VALUES
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.fake_daemon import USERS


def test_every_verb_reaches_the_daemon(client, daemon):
    assert DaemonStatus.model_validate(client.get("/v1/status").json()).job == "job"
    assert PlanReport.model_validate(client.post("/v1/plan").json()).replication.messages == ("because",)
    replanned = client.post("/v1/replan", json={"reason": "new item launch", "wait_seconds": 2.5})
    assert (replanned.status_code, replanned.json()["outcome"]) == (200, "committed")
    assert client.post("/v1/pause", json={"reason": "maintenance", "requested_by": "ann"}).json()["changed"] is True
    assert client.post("/v1/pause", json={}).json()["changed"] is False
    assert client.post("/v1/resume").json() == {"paused": False, "reason": None, "changed": True}
    assert client.post("/v1/resume", json={"reason": "done", "requested_by": "ann"}).json()["changed"] is False
    assert client.post("/v1/config/reload/preview").json()["dry_run"] is True
    assert client.post("/v1/config/reload", json={"requested_by": "ann"}).status_code == 200
    assert client.post("/v1/config/reload").status_code == 200
    assert client.post("/v1/abort/preview", json={}).json()["rollback"] is None
    assert client.post("/v1/abort/preview", json={"rollback": True}).json()["rollback"]["to_version"] == 16
    assert client.post("/v1/resume", json={"reasn": "done"}).status_code == 422
    assert daemon.calls[2:] == [
        ("replan", "new item launch", 2.5), ("pause", "maintenance", "ann"), ("pause", "requested by hand", ""),
        ("resume", "", ""), ("resume", "done", "ann"), ("preview_reload",), ("reload", "", "ann"), ("reload", "", ""),
        ("preview_abort", False), ("preview_abort", True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ApiError("paused", status=409, remedy="resume first"), 409),
        (ApiError("odd", status=0), 500),
        (PlanError("profile is thin", remedy="wait for accesses"), 409),
        (ConfigError("not a number"), 422),
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


def test_metrics_listener_reads_only(server, daemon):
    with httpx.Client(base_url=server._metrics.address, timeout=10) as client:
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


def test_pages_have_the_requested_offset_and_limit(client, daemon):
    tables = TablePage.model_validate(client.get("/v1/tables", params={"offset": 1, "limit": 5}).json())
    assert (tables.total, tables.offset, len(tables.tables)) == (2, 1, 1)
    rows = HotRowPage.model_validate(client.post("/v1/rows", json={"table": "a b/c", "limit": 3}).json())
    assert (rows.table, [row.place for row in rows.hottest]) == ("a b/c", [1, 2, 3])
    assert client.get("/v1/topology", params={"offset": 3}).json()["ranks"][0]["step_seconds"] is None
    users = UserNodePage.model_validate(client.get("/v1/affinity/users", params={"offset": 2, "limit": 2}).json())
    assert users.ids == USERS[2:4]
    assert daemon.calls == [
        ("tables", 1, 5, "accesses"), ("rows", "a b/c", 0, 3), ("ranks", 3, 100), ("user_nodes", 2, 2),
    ]  # fmt: skip
    for path, asked in (("affinity/users", {"offset": -1}), ("tables", {"limit": MAX_PAGE_ENTRIES + 1})):
        assert client.get(f"/v1/{path}", params=asked).status_code == 422
