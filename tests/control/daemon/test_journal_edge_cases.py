"""Cases of retention, compaction and refusal in the journal that random histories seldom reach."""

from __future__ import annotations

import os
import stat
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexd.control.daemon import journal as journal_module
from flexd.control.daemon.journal import Chunk, PlacementJournal, Segment, framed, payload_of
from flexd.control.daemon.migration_record import MigrationRecord
from flexd.core.errors import SnapshotError
from flexd.core.placement import Delta, Placement


def watch_disk(patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records later operations: ``sync NAME``, ``name NAME`` (a file renamed or linked to it)."""
    operations: list[str] = []
    sync, link, rename, replace = os.fsync, os.link, os.rename, os.replace

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        operations.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

    def naming(call: Any) -> Any:
        def named(source: Any, target: Any, **options: Any) -> None:
            call(source, target, **options)
            operations.append(f"name {Path(target).name}")

        return named

    patch.setattr(os, "fsync", fsync)
    for name, call in (("link", link), ("rename", rename), ("replace", replace)):
        patch.setattr(os, name, naming(call))
    return operations


SEGMENT = Segment("a1", 3, "topology")
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


def test_only_the_newest_migration_can_be_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_COMPACT_ROWS", 0)
    journal = begun(tmp_path, FIRST, FIRST, SECOND, SECOND, SECOND)
    start = journal.placement_at(2)
    journal.compact(5)
    journal.close()
    journal = PlacementJournal(tmp_path)
    assert journal.newest_migration == SECOND
    assert journal.placement_at(2).tiers_of(np.arange(ROWS)).tolist() == start.tiers_of(np.arange(ROWS)).tolist()
    with pytest.raises(SnapshotError, match=r"versions 2\.\.5, not 1"):
        journal.placement_at(1)


def test_the_destination_of_a_running_rollback_is_not_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_COMPACT_ROWS", 0)
    back = MigrationRecord(migration_id="m2.rollback", plan_id="p2", base_version=4, returns_to=2)
    journal = begun(tmp_path, FIRST, FIRST, SECOND, SECOND, back)
    journal.compact(5)
    assert journal.placement_at(2).version == 2


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


def _frame(header: dict[str, Any], version: int) -> bytes:
    delta = step(version)
    full = {"kind": "chunk", "version": version, "rows": ROWS, **header}
    return framed(payload_of(full, delta.keys, delta.old_tiers, delta.new_tiers))


@pytest.mark.parametrize(
    ("header", "version"), [({}, 0), ({}, 4), ({"version": -1}, 3), ({"kind": "other"}, 3), ({"rows": ROWS + 1}, 3)]
)
def test_a_complete_record_out_of_sequence_ends_the_journal(
    tmp_path: Path, header: dict[str, Any], version: int
) -> None:
    begun(tmp_path, None, None).close()
    extra = _frame(header, version)
    with (tmp_path / "placement.journal").open("ab") as file:
        file.write(extra)
    journal = PlacementJournal(tmp_path)
    assert (journal.last_version, journal.truncated_bytes) == (2, len(extra))


MIGRATION_FIELDS: dict[str, Any] = {"migration": "m" * 400, "plan": "p" * 400, "base": 2}


@pytest.mark.parametrize(
    "wrong",
    [
        {"migration": None}, {"migration": 1}, {"migration": "x" * 401}, {"plan": "x" * 401}, {"base": -1},
        {"base": "0"}, {"base": None}, {"returns_to": -1}, {"returns_to": "0"},
    ],
)  # fmt: skip
def test_a_chunk_with_invalid_migration_fields_is_still_applied(tmp_path: Path, wrong: dict[str, Any]) -> None:
    begun(tmp_path, FIRST, FIRST).close()
    with (tmp_path / "placement.journal").open("ab") as file:
        file.write(_frame(MIGRATION_FIELDS | wrong, 3))
    journal = PlacementJournal(tmp_path)
    assert (journal.last_version, journal.truncated_bytes, journal.newest_migration) == (3, 0, None)


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

    def fail(directory: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "sync_directory", fail)
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
    with pytest.raises(SnapshotError, match=r"versions 2\.\.4, not 1"):
        reopened.placement_at(1)
