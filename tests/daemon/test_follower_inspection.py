"""Inspection of a follower."""

from __future__ import annotations

import pytest

from flexd.core.errors import ApiError
from flexd.daemon.follower_inspection import FollowerInspection
from tests.support.components import CONFIG


def test_a_follower_shows_its_configuration_only():
    shown = FollowerInspection(CONFIG)
    assert shown.config().config["job"] == "j"
    for ask in (lambda: shown.tables(0, 1, "name"), lambda: shown.rows("t", 0, 1), lambda: shown.ranks(0, 1),
                shown.timeline):  # fmt: skip
        with pytest.raises(ApiError) as refused:
            ask()
        assert refused.value.status == 409
