"""A check that fails is a finding."""

from __future__ import annotations

import os

from flexd.doctor import finding
from flexd.doctor.finding import Level


def test_an_operating_system_error_is_a_finding():
    def look():
        yield finding.ok("a", "first")
        raise PermissionError(13, "Permission denied", os.devnull)

    found = finding.run("a", look)
    assert [each.level for each in found] == [Level.OK, Level.FAULT]
