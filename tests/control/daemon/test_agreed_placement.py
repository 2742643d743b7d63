"""The placement that all ranks have agreed on, after restarts, faults and disagreements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flexd.control.daemon.agreed_placement import AgreedPlacement
from flexd.control.daemon.journal import PlacementJournal, Segment
from flexd.core.errors import SnapshotError
from flexd.core.placement import Delta, Placement

SEGMENT = Segment("a1", 3, "topology")
OTHER_SEGMENT = Segment("a2", 4, "topology")


@pytest.fixture
def journal(tmp_path: Path) -> PlacementJournal:
    """Return a journal with two chunks: row 1 at NODE in version 1, row 2 at DEVICE in version 2."""
    journal = PlacementJournal(tmp_path)
    journal.begin(SEGMENT, Placement.empty())
    for version in (1, 2):
        journal.append(version, Delta(np.array([version]), np.array([0], np.uint8), np.array([version], np.uint8)))
    return journal


def test_before_any_rank_agrees_it_is_the_newest_placement_of_the_journal(journal: PlacementJournal) -> None:
    agreed = AgreedPlacement(journal)
    assert agreed.version == 2
    assert agreed.placement.digest() == journal.placement_at(2).digest()
    assert agreed.placement.tiers_of(np.array([1, 2])).tolist() == [1, 2]


def test_it_continues_from_the_version_of_the_ranks_and_keeps_the_journal(journal: PlacementJournal) -> None:
    agreed = AgreedPlacement(journal)
    assert agreed.continue_from(1, journal.placement_at(1).digest(), SEGMENT)
    assert (agreed.version, agreed.placement.digest()) == (1, journal.placement_at(1).digest())
    assert journal.last_version == 2, "the same attempt: the later chunk is voided by the next one, not here"


def test_it_continues_in_a_new_segment_for_another_attempt(journal: PlacementJournal) -> None:
    agreed, digest = AgreedPlacement(journal), journal.placement_at(1).digest()
    assert agreed.continue_from(1, digest, OTHER_SEGMENT)
    assert (journal.segment, journal.last_version) == (OTHER_SEGMENT, 1)
    assert agreed.placement.digest() == digest


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_placement_that_the_journal_does_not_have_changes_nothing(journal: PlacementJournal, version: int) -> None:
    agreed = AgreedPlacement(journal)
    assert not agreed.continue_from(version, 12345, OTHER_SEGMENT)
    assert (agreed.version, journal.segment, journal.last_version) == (2, SEGMENT, 2)


def test_new_ranks_without_replicas_restart_from_an_empty_placement(tmp_path: Path) -> None:
    journal = PlacementJournal(tmp_path)
    journal.begin(SEGMENT, Placement.of(np.array([7]), np.array([2], np.uint8)))
    agreed = AgreedPlacement(journal)
    assert len(agreed.placement) == 1
    assert agreed.continue_from(0, Placement.empty().digest(), OTHER_SEGMENT)
    assert (len(agreed.placement), journal.segment) == (0, OTHER_SEGMENT)


def test_a_restart_from_a_listed_placement_is_durable(journal: PlacementJournal, tmp_path: Path) -> None:
    listed = Placement.of(np.array([5, 9]), np.array([1, 2], np.uint8), 8)
    AgreedPlacement(journal).restart_from(listed, SEGMENT)
    journal.close()
    restarted = AgreedPlacement(PlacementJournal(tmp_path))
    assert (restarted.version, restarted.placement.digest()) == (8, listed.digest())


def test_a_failed_write_leaves_the_placement(journal: PlacementJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    agreed = AgreedPlacement(journal)

    def fail(segment: Segment, placement: Placement) -> None:
        raise SnapshotError("the disk is full")

    monkeypatch.setattr(journal, "begin", fail)
    with pytest.raises(SnapshotError, match="full"):
        agreed.restart_from(Placement.empty(8), OTHER_SEGMENT)
    assert (agreed.version, agreed.placement.version) == (2, 2)


def test_advance_follows_the_journal_and_never_goes_back(journal: PlacementJournal) -> None:
    agreed = AgreedPlacement(journal)
    journal.append(3, Delta(np.array([1]), np.array([1], np.uint8), np.array([0], np.uint8)))
    agreed.advance(3)
    assert agreed.version == 3
    assert agreed.placement.tiers_of(np.array([1, 2])).tolist() == [0, 2]
    agreed.advance(2)
    assert (agreed.version, agreed.placement.version) == (3, 3)
