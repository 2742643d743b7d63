"""Tables, rows, ranks, timeline and configuration through a real uvicorn: pages are bounded, errors keep their form."""

from __future__ import annotations

import httpx
import pytest

from flexd.api.base import ErrorBody
from flexd.api.table import MAX_PAGE_ENTRIES, HotRowPage, TablePage
from flexd.core.errors import ApiError
from tests.support.api_requests import COMMAND_HEADERS


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.address, timeout=10, headers=COMMAND_HEADERS) as client:
        yield client


def test_pages_have_the_requested_offset_and_limit(client, daemon):
    tables = TablePage.model_validate(client.get("/v1/tables", params={"offset": 1, "limit": 5}).json())
    assert (tables.total, tables.offset, len(tables.tables)) == (2, 1, 1)
    rows = HotRowPage.model_validate(client.post("/v1/rows", json={"table": "a b/c", "limit": 3}).json())
    assert (rows.table, [row.place for row in rows.hottest]) == ("a b/c", [1, 2, 3])
    assert client.get("/v1/topology", params={"offset": 3}).json()["ranks"][0]["step_seconds"] is None
    assert len(client.get("/v1/timeline").json()["samples"]) == 40
    assert client.get("/v1/config").json()["config"]["job"] == "job"
    assert daemon.calls == [
        ("tables", 1, 5, "accesses"),
        ("rows", "a b/c", 0, 3),
        ("ranks", 3, 100),
        ("timeline",),
        ("config",),
    ]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/tables", {"limit": MAX_PAGE_ENTRIES + 1}),
        ("/v1/tables", {"limit": 0}),
        ("/v1/tables", {"offset": -1}),
        ("/v1/tables", {"order": "luck"}),
        ("/v1/rows", {}),
        ("/v1/rows", {"table": "x" * 257}),
        ("/v1/rows", {"table": "t", "offset": 2**41}),
        ("/v1/topology", {"limit": 10**6}),
    ],
)
def test_pages_out_of_bounds_reach_no_handler(client, daemon, path, asked):
    answer = client.post(path, json=asked) if path == "/v1/rows" else client.get(path, params=asked)
    assert answer.status_code == 422
    assert ErrorBody.model_validate(answer.json()).error.type == "RequestError"
    assert daemon.calls == []


@pytest.mark.parametrize("path", ["/v1/config", "/v1/tables", "/v1/rows", "/v1/topology", "/v1/timeline"])
def test_refusals_keep_status_and_remedy(client, daemon, path):
    daemon.error = ApiError("no tables yet", status=409, remedy="start the training")
    method, body = ("POST", {"table": "t"}) if path == "/v1/rows" else ("GET", None)
    answer = client.request(method, path, json=body)
    assert answer.status_code == 409
    assert answer.json()["error"]["remedy"] == "start the training"
    assert client.request(method, path, json=body, headers={"host": "evil.example"}).status_code == 403
