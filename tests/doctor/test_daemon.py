"""Checks of a running daemon."""

from __future__ import annotations

import pytest

from flexd.api.rank import TopologyStatus
from flexd.api.status import Status
from flexd.api.stream import StreamStatus
from flexd.api.threads import ThreadsStatus
from flexd.doctor.daemon import daemon
from flexd.doctor.finding import Level
from tests.support.doctor import levels


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"ready": True}, {"daemon ok": 1, "running configuration ok": 1}),
        ({"ready": False, "reasons": ("ranks: none",)}, {"daemon warning": 1, "running configuration ok": 1}),
        ({"healthy": False, "reasons": ("stuck",)}, {"daemon fault": 1, "running configuration ok": 1}),
        ({"ready": True, "paused": True}, {"daemon warning": 1, "running configuration ok": 1}),
    ],
)
def test_what_the_daemon_says(fields, expected):
    import flexd

    status = Status(job="j", version=flexd.__version__, stream=StreamStatus(source="tap"), **fields)
    assert levels(daemon(status, 0)) == expected
    other = status.model_copy(update={"version": "0.0.1"})
    assert levels(daemon(other, 3))["running configuration warning"] == 1
    assert sum(levels(daemon(other, 3)).values()) == 3


def test_lost_messages_and_a_daemon_that_ends_are_named():
    status = Status(
        job="j", version="1", stream=StreamStatus(source="kafka", messages_lost={"retention": 400}),
        threads=ThreadsStatus(ending="thread flexd-ingest: MemoryError"),
    )  # fmt: skip
    found = [finding.text for finding in daemon(status, 0)]
    assert "lost before they were counted: 400 messages (retention 400)" in found
    assert "the daemon is ending: thread flexd-ingest: MemoryError" in found


def test_the_difference_of_a_refused_trainer_is_printed():
    import flexd

    problem = "no rank is registered; rank 0 of attempt 'a' is refused: the tables differ: items.rows: 3 in the trainer"
    status = Status(
        job="j", version=flexd.__version__, stream=StreamStatus(source="tap"), topology=TopologyStatus(problem=problem),
        healthy=True, ready=True,
    )  # fmt: skip
    findings = {finding.check: finding for finding in daemon(status, 0)}
    assert (findings["ranks"].level, findings["ranks"].text) == (Level.FAULT, problem)
