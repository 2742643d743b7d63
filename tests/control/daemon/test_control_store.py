"""The daemon's store: its number of keys is bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flexd.control.daemon.migration_states import MigrationState
from flexd.core.layout import RankLayout
from tests.support.ranks_in_threads import Ranks, end_epoch, target
from tests.support.until import until

pytestmark = pytest.mark.slow


def test_the_store_does_not_grow(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, RankLayout(2, 1)) as ranks:
        counts = []
        for turn in range(3):
            migration = hosted.coordinator.migrate(
                f"p{turn}", lambda p, turn=turn: p.delta_to(target(turn, 70)).chunks(1)
            )
            assert migration.wait(30) is MigrationState.COMMITTED
            end_epoch(hosted)
            until(lambda turn=turn: hosted.names().count("epoch_live") == turn + 2, what=ranks.state())
            counts.append(len(hosted.coordinator._epochs._hosted.store._server.list_keys()))
        assert hosted.coordinator.status().epochs >= 3
        assert max(counts) <= counts[0] + 2
        assert max(counts) < 100
