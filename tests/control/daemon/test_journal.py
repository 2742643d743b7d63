"""The placement journal: torn, changed and failed writes, voided versions, retention, compaction and refusals."""

import os
import stat
import tracemalloc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.control.daemon import journal as journal_module
from flexd.control.daemon.journal import (
    _MAGIC,
    _MAGIC_OF_ANY,
    FORMAT,
    Chunk,
    PlacementJournal,
    Segment,
    framed,
    payload_of,
)
from flexd.control.daemon.migration import MigrationRecord
from flexd.core.errors import PlacementError, SnapshotError, StateVersionError
from flexd.core.placement import Delta, Placement

SEGMENT = Segment("a1", 3, "topology")


def random_delta(placement: Placement, seed: int, rows: int = 5, total: int = 40) -> Delta:
    rng = np.random.default_rng(seed)
    keys = rng.choice(total, size=rows, replace=False).astype(np.int64)
    return Delta(keys, placement.tiers_of(keys), rng.integers(0, 3, size=rows).astype(np.uint8))


def same(a: Placement, b: Placement) -> bool:
    return a.version == b.version and np.array_equal(a.keys, b.keys) and np.array_equal(a.tiers, b.tiers)


def filled(directory: Path, chunks: int) -> list[Placement]:
    """Write a journal and return the placements of versions 0..chunks."""
    journal = PlacementJournal(directory)
    journal.begin(SEGMENT, Placement.empty())
    placements = [Placement.empty()]
    for version in range(1, chunks + 1):
        delta = random_delta(placements[-1], version)
        journal.append(Chunk(version, delta))
        placements.append(placements[-1].apply(delta))
    journal.close()
    return placements


def test_a_torn_tail_of_any_length_is_truncated(tmp_path: Path) -> None:
    placements = filled(tmp_path / "whole", 3)
    whole = (tmp_path / "whole" / "placement.journal").read_bytes()
    reached = set()
    for length in range(len(whole)):
        directory = tmp_path / str(length)
        directory.mkdir()
        (directory / "placement.journal").write_bytes(whole[:length])
        journal = PlacementJournal(directory)
        reached.add(journal.last_version if journal.segment else -1)
        assert same(journal.placement_at(journal.last_version), placements[journal.last_version])
        if journal.segment:
            last = journal.placement_at(journal.last_version)
            journal.append(Chunk(journal.last_version + 1, random_delta(last, length)))
        reopened = PlacementJournal(directory)
        assert reopened.truncated_bytes == 0
        assert reopened.last_version == journal.last_version
        journal.close()
        reopened.close()
    assert reached == {-1, 0, 1, 2}


@given(at=st.integers(0, 400), flip=st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_a_flipped_byte_never_gives_a_wrong_placement(
    tmp_path_factory: pytest.TempPathFactory, at: int, flip: int
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    placements = filled(directory, 3)
    path = directory / "placement.journal"
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= flip
    path.write_bytes(data)
    if data.startswith(_MAGIC_OF_ANY) and str(FORMAT).encode() < data[len(_MAGIC_OF_ANY) : len(_MAGIC)] <= b"9":
        with pytest.raises(StateVersionError, match="of a newer flexd"):
            PlacementJournal(directory)
        assert path.read_bytes() == data
        return
    journal = PlacementJournal(directory)
    assert journal.truncated_bytes > 0
    assert same(journal.placement_at(journal.last_version), placements[journal.last_version])
    journal.close()


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 10**6)), max_size=25))
@settings(max_examples=60, deadline=None)
def test_voided_versions_agreement_and_restarts(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool, int]]
) -> None:
    """Compare with a list of placements: append after dropping up to 3 versions, compact and reopen at random."""
    directory = tmp_path_factory.mktemp("journal")
    with patch.object(journal_module, "_COMPACT_ROWS", 12):
        journal = PlacementJournal(directory)
        journal.begin(SEGMENT, Placement.empty())
        model = [Placement.empty()]
        agreed = 0
        for back, reopen, seed in steps:
            last = max(agreed, len(model) - 1 - back)
            del model[last + 1 :]
            delta = random_delta(model[-1], seed)
            journal.append(Chunk(last + 1, delta))
            model.append(model[-1].apply(delta))
            if seed % 3 == 0:
                agreed = len(model) - 1 - seed % 2
                journal.compact(agreed)
            if reopen:
                journal.close()
                journal = PlacementJournal(directory)
                assert journal.truncated_bytes == 0
            assert journal.last_version == len(model) - 1
            assert all(same(journal.placement_at(v), model[v]) for v in range(agreed, len(model)))
        journal.close()


@pytest.mark.parametrize("version", [0, 2])
def test_a_chunk_out_of_sequence_is_not_recorded(tmp_path: Path, version: int) -> None:
    journal = PlacementJournal(tmp_path)
    journal.begin(SEGMENT, Placement.empty())
    with pytest.raises(PlacementError, match="cannot follow versions"):
        journal.append(Chunk(version, random_delta(Placement.empty(), 1)))
    journal.append(Chunk(1, random_delta(Placement.empty(), 1)))
    journal.close()
    assert PlacementJournal(tmp_path).last_version == 1


def test_a_failed_write_leaves_the_journal_intact(tmp_path: Path) -> None:
    placements = filled(tmp_path, 2)
    journal = PlacementJournal(tmp_path)
    with patch("os.fsync", side_effect=OSError(28, "No space left on device")):
        with pytest.raises(SnapshotError, match="No space left"):
            journal.append(Chunk(3, random_delta(placements[2], 77)))
        with pytest.raises(SnapshotError, match="No space left"):
            journal.begin(Segment("a2", 4, "other"), Placement.empty())
    assert (journal.segment, journal.last_version) == (SEGMENT, 2)
    journal.append(Chunk(3, random_delta(placements[2], 78)))
    journal.close()
    reopened = PlacementJournal(tmp_path)
    assert reopened.truncated_bytes == 0
    assert same(reopened.placement_at(3), placements[2].apply(random_delta(placements[2], 78)))


def test_a_foreign_file_is_reported_and_replaced(tmp_path: Path) -> None:
    (tmp_path / "placement.journal").write_bytes(b"something else")
    journal = PlacementJournal(tmp_path)
    assert (journal.segment, journal.truncated_bytes) == (None, 14)
    assert (tmp_path / "placement.journal.unusable").read_bytes() == b"something else", "it is kept"
    journal.begin(SEGMENT, Placement.empty())
    assert PlacementJournal(tmp_path).segment == SEGMENT


def test_many_voided_chunks_leave_a_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that ranks never agree on is written again at every try."""
    monkeypatch.setattr("flexd.control.daemon.journal.os.fsync", lambda _: None)
    journal = PlacementJournal(tmp_path)
    rng = np.random.default_rng(1)
    keys = rng.choice(100_000, size=4_000, replace=False).astype(np.int64)
    base = Placement.of(keys[:1_000], np.full(1_000, 1, np.uint8), 7)
    journal.begin(SEGMENT, base)
    kept = Delta(keys[1_000:2_000], np.zeros(1_000, np.uint8), np.full(1_000, 2, np.uint8))
    journal.append(Chunk(8, kept))
    live = (tmp_path / "placement.journal").stat().st_size
    voided = Delta(keys[2_000:], np.zeros(2_000, np.uint8), np.full(2_000, 1, np.uint8))
    largest, tries = 0, 300
    for _ in range(tries):
        journal.append(Chunk(9, voided))
        largest = max(largest, (tmp_path / "placement.journal").stat().st_size)
    assert tries * 10 * len(voided) > 5 * 2**20, "bytes written in all"
    assert largest <= 2 * live + 2**20 + 2 * (10 * len(voided) + 400)
    placements = [base, base.apply(kept), base.apply(kept).apply(voided)]
    assert all(same(journal.placement_at(7 + number), expected) for number, expected in enumerate(placements))
    journal.close()
    again = PlacementJournal(tmp_path)
    assert again.truncated_bytes == 0
    assert all(same(again.placement_at(7 + number), expected) for number, expected in enumerate(placements))
    again.close()


def watch_disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records later operations: ``sync NAME``, ``name NAME`` (a file is renamed to it)."""
    operations: list[str] = []
    sync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        sync(descriptor)
        operations.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

    def renamed(source: Path, target: Path) -> None:
        replace(source, target)
        operations.append(f"name {target.name}")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    return operations


ROWS = 4
FIRST = MigrationRecord(migration_id="m1", plan_id="p1", base_version=0)
SECOND = MigrationRecord(migration_id="m2", plan_id="p2", base_version=2)


def step(version: int, before: int | None = None) -> Delta:
    """Return the chunk of this version, after ``before``: the same rows change through all tiers."""
    old = (version - 1 if before is None else before) % 3
    return Delta(np.arange(ROWS), np.full(ROWS, old, np.uint8), np.full(ROWS, version % 3, np.uint8))


def begun(directory: Path, *migrations: MigrationRecord | None) -> PlacementJournal:
    """Return a journal with a chunk for each of these migrations."""
    journal = PlacementJournal(directory)
    journal.begin(SEGMENT, Placement.empty())
    for version, migration in enumerate(migrations, 1):
        journal.append(Chunk(version, step(version), migration))
    return journal


BACK = MigrationRecord(migration_id="m2.rollback", plan_id="p2", base_version=4, returns_to=2)


MOVES = tuple(
    MigrationRecord(migration_id=f"m2.verify-{number}", plan_id="p2", base_version=4 + number, trigger="verify")
    for number in range(3)
)
THIRD = MigrationRecord(migration_id="m3", plan_id="p3", base_version=7)


@pytest.mark.parametrize("newest", [SECOND, BACK], ids=["migration", "running rollback"])
def test_chunks_of_the_newest_migration_are_not_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: MigrationRecord
) -> None:
    monkeypatch.setattr(journal_module, "_COMPACT_ROWS", 0)
    journal = begun(tmp_path, FIRST, FIRST, SECOND, SECOND, newest)
    start = journal.placement_at(2)
    journal.compact(5)
    journal.close()
    journal = PlacementJournal(tmp_path)
    assert journal.newest_migration == newest
    assert same(journal.placement_at(2), start)
    with pytest.raises(SnapshotError, match=r"versions 0\.\.5, not 1"):
        journal.placement_at(1)


def test_placements_between_migrations_stay_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification moves rows of its plan to and fro: that must not displace what came before the plan."""
    monkeypatch.setattr(journal_module, "_COMPACT_ROWS", 0)
    monkeypatch.setattr(journal_module, "_ROLLBACK_ROWS", 5 * ROWS)
    journal = begun(tmp_path, FIRST, FIRST, SECOND, SECOND)
    placements = [journal.placement_at(version) for version in range(5)]
    for move in MOVES:
        version = move.base_version + 1
        journal.append(Chunk(version, step(version), move))
        placements.append(journal.placement_at(version, placements[-1]))
        journal.compact(version)
    for version in (8, 9):
        journal.append(Chunk(version, step(version), THIRD))
        placements.append(journal.placement_at(version))
        journal.compact(version)
    for known in (journal, PlacementJournal(tmp_path)):
        assert [(each.migration_id, each.base_version, each.last_version) for each in known.migrations()] == [
            ("m1", 0, 2), ("m2", 2, 4), ("m3", 7, 9),
        ]  # fmt: skip
        assert all(same(known.placement_at(version), placements[version]) for version in (0, 2, 4, 7, 8, 9))
        # What was known inside a merged chunk is not built on.
        assert same(known.placement_at(7, placements[5]), placements[7])
        with pytest.raises(SnapshotError, match=r"versions 0\.\.9, not 5"):
            known.placement_at(5)
        with pytest.raises(PlacementError, match="cannot follow versions"):
            known.append(Chunk(6, step(6), THIRD))
    monkeypatch.setattr(journal_module, "_ROLLBACK_ROWS", 4 * ROWS - 1)
    journal.compact(9)
    assert [each.migration_id for each in journal.migrations()] == ["m3"], "the oldest go first"
    assert all(same(journal.placement_at(version), placements[version]) for version in (7, 8, 9))


def test_a_journal_of_the_format_before_is_read(tmp_path: Path) -> None:
    begun(tmp_path, FIRST, FIRST).close()
    path = tmp_path / "placement.journal"
    path.write_bytes(_MAGIC_OF_ANY + b"1" + path.read_bytes()[len(_MAGIC) :])
    journal = PlacementJournal(tmp_path)
    assert (journal.truncated_bytes, journal.last_version, journal.segment) == (0, 2, SEGMENT)
    assert [each.migration_id for each in journal.migrations()] == ["m1"]


@pytest.mark.parametrize(("name", "limit"), [("_ROLLBACK_ROWS", 3 * ROWS), ("_ROLLBACK_CHUNKS", 3)])
def test_chunks_kept_for_a_rollback_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    monkeypatch.setattr(journal_module, "_COMPACT_ROWS", 0)
    monkeypatch.setattr(journal_module, name, limit)
    journal = begun(tmp_path, FIRST, FIRST, FIRST)
    journal.compact(3)
    assert journal.placement_at(0).version == 0
    monkeypatch.setattr(journal_module, name, limit - 1)
    journal.compact(3)
    with pytest.raises(SnapshotError, match=r"versions 3\.\.3, not 0"):
        journal.placement_at(0)
    assert journal.newest_migration is None, "not known any more"


@pytest.mark.parametrize(
    ("header", "version"), [({}, 0), ({}, 4), ({"version": -1}, 3), ({"kind": "other"}, 3), ({"rows": ROWS + 1}, 3)]
)
def test_a_complete_record_out_of_sequence_ends_the_journal(
    tmp_path: Path, header: dict[str, Any], version: int, caplog: pytest.LogCaptureFixture
) -> None:
    begun(tmp_path, None, None).close()
    delta, full = step(version), {"kind": "chunk", "version": version, "rows": ROWS, **header}
    extra = framed(payload_of(full, delta.keys, delta.old_tiers, delta.new_tiers))
    with (tmp_path / "placement.journal").open("ab") as file:
        file.write(extra)
    journal = PlacementJournal(tmp_path)
    assert (journal.last_version, journal.truncated_bytes) == (2, len(extra))
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith(f"{tmp_path / 'placement.journal'}: {len(extra)} bytes were torn or damaged")


def test_a_torn_length_allocates_no_memory(tmp_path: Path) -> None:
    begun(tmp_path, None).close()
    with (tmp_path / "placement.journal").open("ab") as file:
        file.write(b"\xff\xff\xff\x7f" + b"torn")
    tracemalloc.start()
    try:
        journal = PlacementJournal(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (journal.last_version, journal.truncated_bytes) == (1, 8)
    assert peak < 2**22


def test_a_placement_is_synced_before_its_rename_and_a_chunk_before_it_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = PlacementJournal(tmp_path / "state")
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    done = watch_disk(monkeypatch)
    journal.begin(SEGMENT, Placement.empty())
    journal.append(Chunk(1, step(1)))
    assert done == ["sync placement.tmp", "name placement.journal", "sync state", "sync placement.journal"]
    assert stat.S_IMODE((tmp_path / "state" / "placement.journal").stat().st_mode) == 0o600


def test_a_directory_that_cannot_be_synced_loses_no_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_COMPACT_ROWS", 0)
    journal = begun(tmp_path, None, None)
    with patch.object(journal_module, "sync_directory", side_effect=OSError(5, "Input/output error")):
        with pytest.raises(SnapshotError, match="Input/output error"):
            journal.compact(2)
        with pytest.raises(SnapshotError, match="Input/output error"):
            journal.append(Chunk(3, step(3)))
        assert journal.last_version == 2
    done = watch_disk(monkeypatch)
    journal.append(Chunk(3, step(3)))
    journal.append(Chunk(4, step(4)))
    assert done == ["sync placement.journal", f"sync {tmp_path.name}", "sync placement.journal"]
    journal.close()
    reopened = PlacementJournal(tmp_path)
    assert (reopened.last_version, reopened.truncated_bytes) == (4, 0)
    with pytest.raises(SnapshotError, match=r"versions 0\.\.4, not 1"):
        reopened.placement_at(1)
