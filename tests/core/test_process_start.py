"""Uptime follows the monotonic clock."""

from __future__ import annotations

import time

import pytest

from flexd.core.process_start import ProcessStart


def test_setting_the_wall_clock_back_does_not_change_the_uptime(monkeypatch: pytest.MonkeyPatch) -> None:
    started = ProcessStart()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 1e6)
    assert 0 <= started.uptime_seconds < 1e3
    assert started.unix_seconds <= now
