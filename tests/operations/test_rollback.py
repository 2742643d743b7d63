"""Rollback of plans that every rank has applied, over real inboxes, a real channel, journal and history."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flexd.control.daemon import journal as journal_module
from flexd.control.daemon.migration import MigrationState
from flexd.core.errors import ApiError
from flexd.core.placement import Placement
from flexd.operations.decisions import Pause
from flexd.operations.executions import Trigger, TriggerKind
from tests.support.executions_harness import LAYOUT, SECONDS, ExecutionsHarness
from tests.support.ranks_in_threads import Ranks, same_content, target
from tests.support.until import until

FIRST, SECOND = target(1, 60), target(2, 60)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ExecutionsHarness]:
    made = ExecutionsHarness(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def ranks(harness: ExecutionsHarness, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Yield ranks that have applied p1 and p2; the journal is compacted whenever it can be."""
    monkeypatch.setattr(journal_module, "_COMPACT_ROWS", 0)
    with Ranks(harness.coordinator.port, LAYOUT) as made:
        until(harness.ready, SECONDS, made.state())
        commit(harness, "p1", FIRST)
        commit(harness, "p2", SECOND)
        yield made


def commit(harness: ExecutionsHarness, name: str, wanted: Placement) -> None:
    assert harness.start(name, wanted).wait(SECONDS) is MigrationState.COMMITTED


def roll_back(harness: ExecutionsHarness, migration_id: str = "", to_version: int | None = None):  # type: ignore[no-untyped-def]
    return harness.commands.rollback(
        migration_id=migration_id, to_version=to_version, reason="worse", wait_seconds=SECONDS, requested_by="ann"
    )


def refused(harness: ExecutionsHarness, migration_id: str = "", to_version: int | None = None) -> tuple[int, str, str]:
    with pytest.raises(ApiError) as error:
        roll_back(harness, migration_id, to_version)
    return error.value.status, error.value.message, error.value.remedy


def test_a_committed_plan_is_taken_back_also_by_a_later_daemon(
    harness: ExecutionsHarness, ranks: Ranks, tmp_path: Path
) -> None:
    # As a verification does: rows of the plan go and come back.
    for number, placement in enumerate((FIRST, SECOND), 1):
        record = Trigger(TriggerKind.VERIFY, "verification of p2").record(f"p2.verify-{number}", "p2", None)
        assert harness.executions.start(record, placement).wait(SECONDS) is MigrationState.COMMITTED
    preview = harness.commands.preview_rollback(migration_id="p2", to_version=None)
    assert (preview.takes_back, harness.coordinator.placement().digest()) == (("p2",), SECOND.digest())
    result = roll_back(harness, "latest")
    assert (result.outcome, result.takes_back) == ("rolled_back", ("p2",))
    assert result.migration.rows_applied == preview.promotions + preview.demotions == 120
    assert ranks.all_at(FIRST)
    assert same_content(ranks.history)
    assert harness.record_manual_plan == [True], "the interval of automatic plans starts again"
    shown = harness.commands.migration("p2.rollback")
    assert (shown.requested_by, shown.reason, shown.parent_plan_id) == ("ann", "rollback of p2: worse", "p2")
    for kind in ("NODE", "DEVICE", "NODE+DEVICE", "NODE+MOVED"):
        assert harness.decisions.held_reason(kind).startswith("p2 was rolled back by ann: worse; plans for ")
    assert harness.decisions.held_reason("MOVED") == ""
    assert len(harness.decisions.held_reasons()) == 1
    status, message, _ = refused(harness, "p2")
    assert (status, message.partition(": ")[0]) == (409, "migration p2 is rolled back already")

    port = harness.coordinator.port
    harness.stop()
    later = ExecutionsHarness(tmp_path, port)
    try:
        until(later.ready, SECONDS, ranks.state())
        assert later.decisions.held_reason("NODE"), "also after a restart"
        assert not later.executions.resume_rollback(), "it is done"
        assert roll_back(later, "p1").outcome == "rolled_back"
        assert ranks.all_at(Placement.empty())
    finally:
        later.stop()


@pytest.mark.parametrize("version", [0, 6])
def test_a_version_is_restored_with_all_that_came_after_it_taken_back(
    harness: ExecutionsHarness, ranks: Ranks, version: int
) -> None:
    result = roll_back(harness, to_version=version)
    assert (result.outcome, result.takes_back) == ("rolled_back", ("p2", "p1")[: 2 - version // 6])
    assert ranks.all_at(FIRST if version else Placement.empty())
    shown = harness.commands.migration(result.migration.migration_id)
    assert (shown.migration_id, shown.reason) == (
        f"version-{version}.rollback", f"rollback of version-{version}: worse",
    )  # fmt: skip
    status, message, remedy = refused(harness, to_version=version)
    assert (status, f"is that of version {version}" in message) == (409, True)
    assert "one of these versions: 0 (all copies home), 6" in remedy


def test_what_cannot_be_taken_back_is_refused_with_the_way_out(
    harness: ExecutionsHarness, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Placement.of(SECOND.keys, SECOND.tiers % 2 + 1)
    commit(harness, "p3", later)
    assert refused(harness, "p9") == (404, "no migration 'p9' is kept", "flexd get history shows those that are")
    status, message, remedy = refused(harness, "p2")
    assert (status, message) == (409, "60 of the rows that would move were moved again after migration p2, by p3")
    assert "flexd rollback --to 6" in remedy
    assert refused(harness, to_version=3)[:2] == (409, "the placement of version 3 is not kept")
    assert refused(harness, "p2", 3)[0] == refused(harness)[0] == 422

    harness.decisions.update(pause=Pause(reason="night"))
    assert refused(harness, "p3") == (409, "paused: night", "flexd resume")
    harness.decisions.update(pause=None)
    assert roll_back(harness, "p3").outcome == "rolled_back"
    status, message, remedy = refused(harness, "p3.rollback")
    assert (status, "not a plan" in message, "flexd rollback --to VERSION" in remedy) == (409, True, True)

    harness.gate.permits = 2
    running = harness.start("p4", later)
    until(lambda: running.record.chunks_applied == 2, SECONDS)
    assert refused(harness, "p3")[:2] == (409, "migration p4 is running")
    harness.gate.permits = 1_000_000
    assert running.wait(SECONDS) is MigrationState.COMMITTED

    monkeypatch.setattr(journal_module, "_ROLLBACK_ROWS", 10)
    commit(harness, "p5", target(3, 60))
    status, message, remedy = refused(harness, "p2")
    assert (status, "the placement before it is not kept any more" in message) == (409, True)
    assert roll_back(harness, to_version=0).outcome == "rolled_back", "always possible"
    assert ranks.all_at(Placement.empty())
    assert np.array_equal(harness.coordinator.placement().keys, Placement.empty().keys)
