"""The OpenAPI document against a real daemon without ranks: generated requests cause no fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from flexd.config.model import Config
from flexd.server.access import READING_POSTS
from tests.support.api_contract import RESPONSE_CHECKS, for_every_request, operations_of
from tests.support.api_requests import COMMAND_HEADERS

READ, ADMIN = "the token of the dashboard", "the token of the operator"


def bearer(token: str) -> dict[str, str]:
    return {**COMMAND_HEADERS, "authorization": f"Bearer {token}"}


def test_a_real_daemon_answers_as_documented_and_reading_changes_nothing(
    start: Callable[..., Any], make_config: Callable[..., Config], tmp_path: Path
) -> None:
    for name, token in (("read", READ), ("admin", ADMIN)):
        (tmp_path / name).write_text(token)
    tokens = [{"name": name, "scope": name, "file": str(tmp_path / name)} for name in ("read", "admin")]
    daemon = start(make_config(server={"port": 0, "tokens": tokens})).daemon
    url = daemon.address
    document = httpx.get(f"{url}/openapi.json", headers=bearer(READ), timeout=20).json()
    statuses: dict[str, set[int]] = {}

    def settled() -> tuple[Any, ...]:
        status = httpx.get(f"{url}/v1/status", headers=bearer(READ), timeout=20).json()
        throttle = httpx.get(f"{url}/v1/throttle", headers=bearer(READ), timeout=20).json()
        return (status["paused"], status["migration"], status["placement"], throttle["bytes_per_step"])

    before = settled()
    for operation in operations_of(document):

        def reading(case: Any) -> None:
            answer = case.call(base_url=url, headers=bearer(READ), timeout=30)
            if case.method != "GET" and case.path not in READING_POSTS:
                assert answer.status_code == 403

        for_every_request(operation, reading, examples=1)
    assert settled() == before
    for operation in operations_of(document):
        seen = statuses.setdefault(operation.label, set())

        def asking(case: Any, seen: set[int] = seen) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("wait_seconds"), int | float):
                case.body["wait_seconds"] = min(case.body["wait_seconds"], 0.01)
            answer = case.call(base_url=url, headers=bearer(ADMIN), timeout=30)
            case.validate_response(answer, checks=RESPONSE_CHECKS)
            seen.add(answer.status_code)

        for_every_request(operation, asking, examples=3)
    assert not {label: seen for label, seen in statuses.items() if seen & {401, 403, 500, 502, 504}}
    assert 200 in statuses["POST /v1/pause"]
    assert 409 in statuses["POST /v1/replan"]
