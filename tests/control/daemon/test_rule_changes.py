"""Home rules that change by chunks: agreed on, journalled, listed by the ranks, and taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flexd.control.daemon.migration import ChunkSource
from flexd.control.daemon.migration_states import MigrationState
from flexd.core.home_block import NO_CHANGES, ChangedRule, ChangedRules
from flexd.core.home_rules import HomeRule
from flexd.core.layout import RankLayout
from flexd.core.placement import Delta, Placement
from tests.support.ranks_in_threads import Ranks, same_content, target
from tests.support.until import until

ROWS = 50_000
WHOLE = ChangedRules((ChangedRule(0, ROWS, HomeRule(), HomeRule("rank", 1)),))
"""The first table of the ranks is whole on rank 1."""


def to_rules(target: ChangedRules, rows: int) -> ChunkSource:
    """Return what makes chunks of at most ``rows`` rows that lead to these rules."""

    def chunks(placement: Placement) -> Iterator[Delta]:
        for block in placement.homes.blocks_to(target):
            yield from Delta.of_homes(block).chunks(rows)

    return chunks


def boundaries(ranks: Ranks) -> list[int]:
    return [rank.inbox._homes.boundary(0) for rank in ranks.ranks]


def test_a_rule_changes_with_copies_beside_it_and_back(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, RankLayout(2, 2), spare=ROWS) as ranks:
        changed = hosted.coordinator.migrate("p1", to_rules(WHOLE, 20_000))
        assert changed.wait(20) is MigrationState.COMMITTED, hosted.events
        assert (changed.progress.rows_applied, changed.progress.chunks_applied) == (ROWS, 3)
        assert {str(rank.inbox._homes.rules[0]) for rank in ranks.ranks} == {"rank:1"}
        assert hosted.coordinator.placement().homes == WHOLE
        copied = hosted.coordinator.migrate("p2", lambda p: p.delta_to(target(1)).chunks(200))
        assert copied.wait(20) is MigrationState.COMMITTED, hosted.events
        assert same_content(ranks.history)
        back = hosted.coordinator.migrate("p3", to_rules(NO_CHANGES, 20_000))
        assert back.wait(20) is MigrationState.COMMITTED, hosted.events
        assert hosted.coordinator.placement().digest() == target(1).digest()
        assert ranks.all_at(target(1))


def test_a_daemon_that_ends_in_the_middle_leaves_a_change_that_the_next_one_completes_or_takes_back(
    host: Callable[..., Any],
) -> None:
    first = host()
    with Ranks(first.port, RankLayout(2, 1), spare=ROWS) as ranks:
        running = first.coordinator.migrate("p1", to_rules(WHOLE, 10))
        until(lambda: running.progress.chunks_applied > 20)
        first.close()
        second = host(port=first.port)
        until(second.ready, what=lambda: second.events)
        assert "placement_listed" not in second.names(), "the journal has it"
        half = second.coordinator.placement().homes.of_table(0)
        assert half is not None
        assert half.lower == HomeRule("rank", 1)
        assert 200 <= half.boundary < ROWS
        until(lambda: boundaries(ranks) == [half.boundary] * 2)
        done = second.coordinator.migrate("p2", to_rules(WHOLE, 20_000))
        assert done.wait(20) is MigrationState.COMMITTED, second.events
        assert done.progress.rows_applied == ROWS - half.boundary
        back = second.coordinator.migrate("p3", to_rules(NO_CHANGES, 500))
        until(lambda: back.progress.chunks_applied > 5)
        again = second.coordinator.migrate("p4", to_rules(WHOLE, 20_000))
        assert again.wait(20) is MigrationState.COMMITTED, second.events
        assert second.coordinator.placement().homes == WHOLE


def test_ranks_list_changed_rules_to_a_daemon_that_has_lost_them(host: Callable[..., Any], tmp_path: Path) -> None:
    first = host()
    with Ranks(first.port, RankLayout(2, 1), spare=ROWS) as ranks:
        half = ChangedRules((ChangedRule(0, ROWS, HomeRule(), HomeRule(), HomeRule("node", 0), 12_345),))
        assert first.coordinator.migrate("p1", to_rules(half, 50_000)).wait(20) is MigrationState.COMMITTED
        first.close()
        second = host(tmp_path / "other", port=first.port)
        until(second.ready, what=lambda: second.events)
        assert "placement_listed" in second.names()
        assert second.coordinator.placement().homes == half
        assert second.coordinator.migrate("p2", to_rules(NO_CHANGES, 50_000)).wait(20) is MigrationState.COMMITTED
        assert ranks.all_at(Placement.empty())


def test_a_rank_without_room_refuses_by_name(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, RankLayout(2, 1)) as ranks:
        failed = hosted.coordinator.migrate("p1", to_rules(WHOLE, 20_000))
        assert failed.wait(20) is MigrationState.FAILED
        assert "table 'item': rule rank:1 needs 50000 home slots in a row" in failed.reason
        until(hosted.ready)
        good = hosted.coordinator.migrate("p2", lambda p: p.delta_to(target(1)).chunks(200))
        assert good.wait(20) is MigrationState.COMMITTED, hosted.events
        assert ranks.all_at(target(1))
