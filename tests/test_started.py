"""Uptime by a clock that nobody sets."""

from __future__ import annotations

import time

import pytest

from flexd.core.process_start import ProcessStart


def test_a_calendar_that_is_set_back_does_not_make_a_process_younger(monkeypatch: pytest.MonkeyPatch) -> None:
    started = ProcessStart()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 1e6)
    assert 0 <= started.uptime_seconds < 1e3
    assert started.unix_seconds <= now
