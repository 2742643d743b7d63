"""The OpenAPI document against the server, by requests that schemathesis generates."""

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from schemathesis import checks

from flexd.api.base import http_status
from flexd.core.errors import (
    ApiError,
    ConfigError,
    ControlError,
    PlacementError,
    PlanError,
    SnapshotError,
    StreamError,
    TopologyError,
)
from flexd.server.access import READING_POSTS
from flexd.server.app import Metrics, create_app
from tests.support.api_contract import RESPONSE_CHECKS, asks_for_something, for_every_request, operations_of
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.api_tokens import ADMIN, READ, serve, token_configs
from tests.support.fake_daemon import FakeDaemon

ERRORS: list[Exception | None] = [
    None, ApiError("x", status=409), ApiError("x", status=503), ConfigError("x"), ControlError("x"),
    PlacementError("x"), PlanError("x"), SnapshotError("x"), StreamError("x"), TopologyError("x"),
]  # fmt: skip


@pytest.fixture(scope="module")
def url(fake: FakeDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(fake, tokens=token_configs(tmp_path_factory.mktemp("tokens"))) as server:
        yield server.address


def bearer(token: str) -> dict[str, str]:
    return {**COMMAND_HEADERS, "authorization": f"Bearer {token}"}


OPERATIONS = operations_of(create_app(FakeDaemon(), Metrics(FakeDaemon())).openapi())


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_every_answer_is_documented(operation: Any, url: str, fake: FakeDaemon) -> None:
    documented = operation.definition.raw["responses"]
    possible = [error for error in ERRORS if error is None or str(http_status(error)) in documented]
    statuses: set[int] = set()
    turns = itertools.count()

    def check(case: Any) -> None:
        turn = next(turns)
        fake.error = possible[turn // 2 % len(possible)] if turn % 2 and case.path.startswith("/v1") else None
        fake.outcome = ("committed", "timed_out")[turn // 2 % 2]
        response = case.call(base_url=url, headers=bearer(ADMIN), timeout=20)
        statuses.add(response.status_code)
        case.validate_response(
            response,
            checks=RESPONSE_CHECKS,
        )
        assert response.status_code < 500 or (response.status_code == 503 and fake.error is not None)

    fake.__init__()
    for_every_request(operation, check)
    if not asks_for_something(operation):
        for _ in range(2 * len(possible)):
            check(operation.Case())
    expected = {http_status(error) for error in possible if error is not None}
    assert statuses & {200, 202, 404}
    assert statuses >= expected or not operation.path.startswith("/v1")
    assert 401 not in statuses


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_a_token_that_may_read_changes_nothing(operation: Any, url: str, fake: FakeDaemon) -> None:
    fake.__init__()
    before = (fake.paused, fake.outcome)

    def check(case: Any) -> None:
        response = case.call(base_url=url, headers=bearer(READ), timeout=20)
        if case.method != "GET" and case.path not in READING_POSTS:
            assert response.status_code == 403
            assert fake.calls == []
        else:
            assert response.status_code != 403
        case.validate_response(response, checks=[checks.status_code_conformance])
        assert (fake.paused, fake.outcome) == before

    for_every_request(operation, check)


def test_every_route_that_changes_state_documents_its_answers(url: str) -> None:
    paths = httpx.get(f"{url}/openapi.json", headers=bearer(READ)).json()["paths"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            if path in ("/healthz", "/readyz"):
                assert set(operation["responses"]) == {"200", "503"}
            elif path.startswith("/v1"):
                assert {"200", "401", "403", "429", "500", "503"} <= set(operation["responses"]), path
            if method != "get":
                assert {"400", "401", "403", "408", "409", "413", "422", "429"} <= set(operation["responses"]), path


def test_other_methods_and_paths_are_errors_of_the_same_form(url: str, fake: FakeDaemon) -> None:
    fake.__init__()
    for method, path, status in [
        ("DELETE", "/v1/status", 405), ("GET", "/v1/plan", 405), ("GET", "/v1/pause", 405), ("GET", "/v2", 404),
        ("PUT", "/", 405), ("OPTIONS", "/v1/status", 405),
    ]:  # fmt: skip
        answer = httpx.request(method, url + path, headers=bearer(ADMIN), timeout=10)
        assert answer.status_code == status, (method, path)
        assert answer.json()["error"]["remedy"]
    assert fake.calls == []
