"""Requests that a web page of another site can make a browser send start no work, on any route."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from flexd.api.base import REQUEST_HEADER
from flexd.server.app import Metrics, create_app
from tests.support.fake_daemon import FakeDaemon

CROSS_SITE: list[dict[str, str]] = [
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
    # A page of another port of this machine is of the same site.
    {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
    {"sec-fetch-site": "something-new"},
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"host": "evil.example"},
]
FORM_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x")
"""Content types that a page may send to another site without asking it first."""


def routes() -> list[tuple[str, str]]:
    """Return method and path of every route of the admin API, the page included."""
    fake = FakeDaemon()
    app = create_app(fake, Metrics(fake))
    return sorted(
        (method, re.sub(r"{\w+}", "latest", route.path))
        for route in app.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    )


ROUTES = routes()
POSTS = [path for method, path in ROUTES if method == "POST"]


@pytest.fixture
def bare(server: Any) -> Iterator[httpx.Client]:
    """Yield a client that adds no header of its own, as a browser would not."""
    with httpx.Client(base_url=server.address, timeout=10) as client:
        yield client


@pytest.mark.parametrize("headers", CROSS_SITE, ids=str)
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_refuses_other_sites(
    bare: httpx.Client, daemon: FakeDaemon, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = bare.request(method, path, headers={REQUEST_HEADER: "x", **headers})
    assert answer.status_code == 403
    assert answer.json()["error"]["remedy"]
    assert daemon.calls == []


@pytest.mark.parametrize("path", POSTS)
def test_every_post_needs_a_header_that_no_form_can_send(bare: httpx.Client, daemon: FakeDaemon, path: str) -> None:
    """Browsers that send neither ``Origin`` nor ``Sec-Fetch-Site`` send no header of a page's own to another site."""
    for kind in (*FORM_TYPES, "application/json"):
        answer = bare.post(path, content=b"{}", headers={"content-type": kind})
        assert answer.status_code == 403
        assert REQUEST_HEADER in answer.json()["error"]["remedy"].lower()
    assert bare.post(path, content=b"{}", headers={REQUEST_HEADER: ""}).status_code == 403
    assert daemon.calls == []


def test_a_preflight_gets_no_permission(bare: httpx.Client, daemon: FakeDaemon) -> None:
    for path in POSTS:
        asked = {"origin": "https://evil.example", "access-control-request-headers": REQUEST_HEADER}
        answer = bare.options(path, headers=asked)
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert answer.status_code == 403
    assert daemon.calls == []


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_the_own_page_and_the_address_bar_are_served(bare: httpx.Client, site: str) -> None:
    for path in ("/", "/v1/status", "/metrics", "/healthz"):
        assert bare.get(path, headers={"sec-fetch-site": site}).status_code == 200
    assert bare.post("/v1/plan", headers={"sec-fetch-site": site, REQUEST_HEADER: "page"}).status_code == 200
