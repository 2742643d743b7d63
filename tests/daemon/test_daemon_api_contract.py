"""The OpenAPI document against a real daemon without ranks: generated requests cause no fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

from flexd.config.model import Config
from tests.support.api_contract import RESPONSE_CHECKS, for_every_request, operations_of
from tests.support.api_requests import COMMAND_HEADERS


def test_a_real_daemon_answers_as_documented(start: Callable[..., Any], make_config: Callable[..., Config]) -> None:
    url = start(make_config()).daemon.address
    document = httpx.get(f"{url}/openapi.json", timeout=20).json()
    statuses: dict[str, set[int]] = {}
    for operation in operations_of(document):
        seen = statuses.setdefault(operation.label, set())

        def asking(case: Any, seen: set[int] = seen) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("wait_seconds"), int | float):
                case.body["wait_seconds"] = min(case.body["wait_seconds"], 0.01)
            answer = case.call(base_url=url, headers=COMMAND_HEADERS, timeout=30)
            case.validate_response(answer, checks=RESPONSE_CHECKS)
            seen.add(answer.status_code)

        for_every_request(operation, asking, examples=3)
    assert not {label: seen for label, seen in statuses.items() if seen & {401, 403, 500, 502, 504}}
    assert 200 in statuses["POST /v1/pause"]
    assert 409 in statuses["POST /v1/replan"]
