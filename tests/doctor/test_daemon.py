"""Checks of a running daemon."""

from __future__ import annotations

import pytest

from flexd.api.status import DaemonStatus
from flexd.api.stream import StreamStatus
from flexd.doctor.daemon import daemon
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

    status = DaemonStatus(job="j", version=flexd.__version__, stream=StreamStatus(source="tap"), **fields)
    assert levels(daemon(status, [])) == expected
    other = status.model_copy(update={"version": "0.0.1"})
    assert levels(daemon(other, ["log.level"]))["running configuration warning"] == 1
    assert sum(levels(daemon(other, ["log.level"])).values()) == 3
