"""Requests made from an OpenAPI document by schemathesis, a fixed and bounded number of them."""

from collections.abc import Callable
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode, checks

RESPONSE_CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]


def operations_of(document: dict[str, Any]) -> list[Any]:
    """Every method of every path."""
    return [found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()]


def asks_for_something(operation: Any) -> bool:
    """Return True if a request has anything that could be wrong."""
    return bool(operation.query or operation.path_parameters or operation.body)


def for_every_request(operation: Any, check: Callable[[Any], None], examples: int = 15) -> None:
    """Calls ``check`` with requests as the document has them, and with others, as many of each at most."""
    bounded = settings(
        max_examples=examples, deadline=None, phases=[Phase.explicit, Phase.generate], derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        if mode is GenerationMode.POSITIVE or asks_for_something(operation):
            bounded(given(operation.as_strategy(generation_mode=mode))(lambda case: check(case)))()
