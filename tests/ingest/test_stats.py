"""Statistics of ingest: every reason that a message or an access can be rejected for is listed."""

from __future__ import annotations

import dataclasses

from flexd.core import tap_counts
from flexd.ingest.stats import MESSAGE_REASONS, ROW_REASONS
from flexd.sketch.types import AccessCounts
from flexd.stream.codecs import codec


def test_every_reason_of_the_codecs_is_listed_once() -> None:
    assert {*codec.REASONS, *tap_counts.REASONS} < set(MESSAGE_REASONS)
    assert "internal_error" in MESSAGE_REASONS
    assert list(MESSAGE_REASONS) == sorted(set(MESSAGE_REASONS))


def test_every_outcome_of_an_access_is_a_rejection_or_a_rule() -> None:
    outcomes = {field.name for field in dataclasses.fields(AccessCounts)}
    assert outcomes - {"accepted", "future_clamped", "late"} == set(ROW_REASONS)
