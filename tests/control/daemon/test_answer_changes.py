"""Answers that change by chunks: agreed on, journalled, listed by the ranks, and taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flexd.control.daemon.migration import ChunkSource
from flexd.control.daemon.migration_states import MigrationState
from flexd.core.answers import NO_ANSWERS, AnswerChange, TableAnswers
from flexd.core.layout import RankLayout
from flexd.core.placement import Delta, Placement
from tests.support.ranks_in_threads import Ranks, same_content, target
from tests.support.until import until

BY_ROWS = TableAnswers(frozenset({0, 1}), frozenset({1}))
FLIPPED = AnswerChange((1,), (0,))


def to_answers(target: AnswerChange) -> ChunkSource:
    """Return what makes a chunk for each table that leads to these answers."""

    def chunks(placement: Placement) -> Iterator[Delta]:
        yield from Delta.of_answers(placement.answers.change_to(target)).chunks(1)

    return chunks


def test_answers_change_with_copies_beside_them_and_back(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, RankLayout(2, 2), answers=BY_ROWS) as ranks:
        changed = hosted.coordinator.migrate("p1", to_answers(FLIPPED))
        assert changed.wait(20) is MigrationState.COMMITTED, hosted.events
        assert (changed.progress.rows_applied, changed.progress.chunks_applied) == (2, 2)
        assert hosted.coordinator.placement().answers == FLIPPED
        copied = hosted.coordinator.migrate("p2", lambda p: p.delta_to(target(1)).chunks(200))
        assert copied.wait(20) is MigrationState.COMMITTED, hosted.events
        assert same_content(ranks.history)
        assert {rank.inbox.changed_answers for rank in ranks.ranks} == {FLIPPED}
        back = hosted.coordinator.migrate("p3", to_answers(NO_ANSWERS))
        assert back.wait(20) is MigrationState.COMMITTED, hosted.events
        assert hosted.coordinator.placement().digest() == target(1).digest()
        assert ranks.all_at(target(1))


def test_the_next_daemon_knows_answers_from_its_journal_or_from_the_ranks(
    host: Callable[..., Any], tmp_path: Path
) -> None:
    first = host()
    with Ranks(first.port, RankLayout(2, 1), answers=BY_ROWS) as ranks:
        assert first.coordinator.migrate("p1", to_answers(FLIPPED)).wait(20) is MigrationState.COMMITTED
        first.close()
        second = host(port=first.port)
        until(second.ready, what=lambda: second.events)
        assert "placement_listed" not in second.names(), "the journal has it"
        assert second.coordinator.placement().answers == FLIPPED
        half = AnswerChange((1,))
        assert second.coordinator.migrate("p2", to_answers(half)).wait(20) is MigrationState.COMMITTED
        second.close()
        third = host(tmp_path / "other", port=first.port)
        until(third.ready, what=lambda: third.events)
        assert "placement_listed" in third.names()
        assert third.coordinator.placement().answers == half
        assert third.coordinator.migrate("p3", to_answers(NO_ANSWERS)).wait(20) is MigrationState.COMMITTED
        assert ranks.all_at(Placement.empty())


def test_a_rank_whose_tables_are_not_pooled_refuses_by_name(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, RankLayout(2, 1)) as ranks:
        failed = hosted.coordinator.migrate("p1", to_answers(AnswerChange((), (0,))))
        assert failed.wait(20) is MigrationState.FAILED
        assert "table 'item' cannot change its answer: its look-ups are not pooled" in failed.reason
        until(hosted.ready)
        good = hosted.coordinator.migrate("p2", lambda p: p.delta_to(target(1)).chunks(200))
        assert good.wait(20) is MigrationState.COMMITTED, hosted.events
        assert ranks.all_at(target(1))
