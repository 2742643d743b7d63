"""The HTTP status of each error."""

from __future__ import annotations

import pytest

from flexd.api.base import error_body, http_status
from flexd.core.errors import ApiError, ConfigError, FlexdError, PlanError, SketchError, StreamError


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ApiError("x", status=404), 404), (ApiError("x", status=200), 500), (ConfigError("x"), 422),
        (PlanError("x"), 409), (StreamError("x"), 503), (SketchError("x"), 500),
    ],
)  # fmt: skip
def test_every_error_has_a_status(error: FlexdError, status: int) -> None:
    assert http_status(error) == status


def test_a_body_names_class_message_and_remedy() -> None:
    assert error_body(PlanError("too few", remedy="wait")).model_dump() == {
        "error": {"type": "PlanError", "message": "too few", "remedy": "wait"}
    }
