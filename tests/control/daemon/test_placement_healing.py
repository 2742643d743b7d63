"""A rank that reports another placement than the daemon has recorded: healed once, then pushing is paused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flexd.control.daemon.migration_record import MigrationState
from flexd.core.layout import RankLayout
from tests.support.ranks_in_threads import Ranks, migrate, same_content, target
from tests.support.until import until

pytestmark = pytest.mark.slow


def mismatches(hosted: Any) -> int:
    return int(hosted.coordinator.status().digest_mismatches)


def test_a_wrong_record_of_the_daemon_is_replaced_by_what_the_ranks_list(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, RankLayout(2, 2)) as ranks:
        first = migrate(hosted.coordinator, "p1", target(1), 200)
        assert first.wait(20) is MigrationState.COMMITTED
        running = migrate(hosted.coordinator, "p2", target(2), 5)
        until(lambda: running.record.chunks_applied > 2)
        pusher = hosted.coordinator._pusher
        for version in list(pusher._digests):
            pusher._digests[version] ^= 1
        until(lambda: mismatches(hosted) > 0)
        assert running.wait(20) is MigrationState.FAILED
        assert "reports another placement at version" in running.record.problem
        until(lambda: "placement_listed" in hosted.names() and hosted.ready(), what=lambda: hosted.events)
        again = migrate(hosted.coordinator, "p3", target(3), 100)
        assert again.wait(20) is MigrationState.COMMITTED, hosted.events
        assert ranks.all_at(target(3))
        assert same_content(ranks.history)
        assert hosted.coordinator.placement().digest() == target(3).digest()
        assert mismatches(hosted) == 1
        assert (hosted.coordinator.divergence, hosted.coordinator._pusher.paused) == ("", False)


def test_pushing_pauses_after_a_repeat_until_an_operator_resumes(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, RankLayout(2, 1)) as ranks:
        until(hosted.ready)
        ranks.false_digests[1] = 12345
        until(lambda: hosted.coordinator.divergence, what=lambda: hosted.events)
        assert hosted.coordinator.divergence == (
            "rank 1 reports another placement at version 0 than the daemon has recorded, again after the daemon has "
            "read the ranks' placement"
        )
        assert hosted.names().count("placement_listed") == 1
        until(hosted.ready)
        assert hosted.coordinator._pusher.paused
        epochs = hosted.coordinator.status().epochs
        waiting = migrate(hosted.coordinator, "p1", target(1, 50), 10)
        seen = mismatches(hosted)
        until(lambda: mismatches(hosted) > seen + 2)
        assert waiting.record.chunks_pushed == 0
        assert hosted.coordinator.status().epochs == epochs, "a paused channel keeps its epoch"
        hosted.coordinator.resume()
        until(lambda: hosted.names().count("pushing_paused") == 2, what=lambda: hosted.events)
        assert hosted.names().count("placement_listed") == 2
        ranks.false_digests.clear()
        seen = mismatches(hosted)
        hosted.coordinator.resume()
        good = migrate(hosted.coordinator, "p2", target(2, 50), 10)
        assert good.wait(20) is MigrationState.COMMITTED, hosted.events
        assert ranks.all_at(target(2, 50))
