"""Files of every earlier format are read; those of a newer one are refused by name and stay as they are.

A folder of ``formats`` holds the files that one commit wrote (``write_files.py``), and what they contain.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from flexd.config.tables_file import load_tables
from flexd.control.daemon.journal import PlacementJournal
from flexd.core.errors import StateVersionError, UnusableStateError
from flexd.core.keyspace import TableSpec
from flexd.daemon.state_files import FILES, check_files
from flexd.ingest import Ingestor
from flexd.ingest.restore import GENERATION_RESERVE, restore
from flexd.operations.decisions import DecisionFile, Pause
from flexd.operations.history.records import EffectRecord
from flexd.operations.history.store import HistoryStore
from flexd.operations.plan_log import PlanLog
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.types import SketchSettings
from flexd.stream.offsets_in_work import OffsetsInWork

FORMATS = sorted(path for path in (Path(__file__).parent / "formats").iterdir() if path.is_dir())
TABLES = [
    TableSpec("users", 500, 8, "float32", "adam"),
    TableSpec("items", 20_000, 8),
    TableSpec("clicks", 3_000_000, 16),
]
SETTINGS = {
    "logarithmic": SketchSettings(memory_bytes=180_000, half_life_seconds=600.0, max_hot_rows=50),
    "plain": SketchSettings(memory_bytes=200_000, half_life_seconds=None, max_hot_rows=64, conservative=False,
                            logarithmic=False),
}  # fmt: skip


@pytest.fixture(params=FORMATS, ids=lambda path: path.name)
def state(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of the files of one commit."""
    return Path(shutil.copytree(request.param, tmp_path / "state"))


@pytest.fixture
def expected(state: Path) -> dict:
    return json.loads((state / "expected.json").read_text())


@pytest.mark.parametrize("name", SETTINGS)
def test_snapshots_of_every_format_are_read(state: Path, expected: dict, name: str) -> None:
    wanted = expected["snapshots"][name]
    restored = restore(SnapshotStore(state / name / "snapshots", 2), TABLES, SETTINGS[name])
    assert restored.problems == []
    assert [outcome.outcome for outcome in restored.outcomes] == ["kept"] * len(TABLES)
    _assert_counts(restored.sketches, wanted)
    assert restored.positions == wanted["positions"]
    assert restored.generation == wanted["generation"] + GENERATION_RESERVE
    assert restored.extra["live_plan_id"] == "plan-7"


@pytest.mark.parametrize("where", [0, 1, 3])
def test_a_table_added_to_a_snapshot_of_every_format(state: Path, expected: dict, where: int) -> None:
    """Format 4 does not name its tables: they are found by their digest."""
    tables = [*TABLES[:where], TableSpec("new", 10, 4), *TABLES[where:]]
    settings = SketchSettings(memory_bytes=230_000, half_life_seconds=600.0, max_hot_rows=50)
    restored = restore(SnapshotStore(state / "logarithmic" / "snapshots", 2), tables, settings)
    by_table = {outcome.table: outcome.outcome for outcome in restored.outcomes}
    assert by_table["new"] == "new"
    assert "emptied" not in by_table.values()
    samples = dict(zip((table.name for table in tables), restored.sketches.samples_by_table(), strict=True))
    wanted = expected["snapshots"]["logarithmic"]["samples"]
    assert [samples[table.name] for table in TABLES] == wanted


def test_the_table_list_of_format_4_must_be_known(state: Path) -> None:
    store = SnapshotStore(state / "logarithmic" / "snapshots", 2)
    with pytest.raises(UnusableStateError, match=r"does not name its 3 tables.*configuration that wrote it"):
        restore(store, [TABLES[0], TableSpec("items", 30_000, 8), TABLES[2]], SETTINGS["logarithmic"])


def test_what_an_old_snapshot_becomes_is_read_again(state: Path, expected: dict) -> None:
    name = "logarithmic"
    directory = state / name / "snapshots"
    first = restore(SnapshotStore(directory, 2), TABLES, SETTINGS[name])
    meta, arrays = first.sketches.state()
    saved = {"format": 1, "sketches": meta, "positions": first.positions, "generation": 3, "saved": first.extra}
    SnapshotStore(directory, 2).save(json.loads(json.dumps(saved)), arrays)
    second = restore(SnapshotStore(directory, 2), TABLES, SETTINGS[name])
    assert second.path is not None
    assert second.path.name == "snapshot-000000000002.flexd"
    _assert_counts(second.sketches, expected["snapshots"][name])


def test_journals_of_every_format_are_read(state: Path, expected: dict) -> None:
    journal = PlacementJournal(state / "placement")
    wanted = expected["journal"]
    live = journal.placement_at(journal.last_version)
    assert (journal.truncated_bytes, journal.last_version) == (0, wanted["version"])
    assert journal.segment is not None
    assert journal.segment.attempt == wanted["attempt"]
    assert (live.keys.tolist(), live.tiers.tolist()) == (wanted["keys"], wanted["tiers"])
    newest = journal.newest_migration
    assert newest is not None
    assert (newest.migration_id, newest.returns_to) == ("m-2", 5)
    journal.close()


def test_histories_of_every_format_are_read(state: Path, expected: dict) -> None:
    quarantined: list[str] = []
    store = HistoryStore(state / "migrations.sqlite", 100, quarantined.append)
    store.open()
    (record,) = store.newest(5)
    found = store.find("m-1")
    assert found is not None
    assert (record.state, record.problem, len(found[1])) == (
        expected["history"]["state"], "a rank left", expected["history"]["transitions"],
    )  # fmt: skip
    (action,) = store.newest_actions(5)
    assert (action.kind, action.who, action.reason) == ("pause", "ada", "night")
    effect = EffectRecord("m-1", 0.002, None, None, 0, None, None, 0)
    assert store.effects(["m-1"]) == {}
    store.write([effect])
    assert store.effects(["m-1"]) == {"m-1": effect}
    assert quarantined == []
    store.close()


def test_decisions_and_plans_of_every_format_are_read(state: Path) -> None:
    file = DecisionFile(state / "decisions.json")
    assert file.quarantined == 0
    assert file.current.pause == Pause(reason="night", who="ada", unix_seconds=1.75e9)
    assert file.current.throttle is not None
    assert file.current.throttle.bytes_per_step == 4096
    assert file.current.rollback is not None
    assert file.current.rollback.migration_ids == ("m-1",)
    assert PlanLog(state / "plans.jsonl").entries == [{"plan_id": "plan-1", "unix_seconds": 1.75e9, "rows": 30}]


def _newer_journal(state: Path) -> None:
    path = state / "placement" / "placement.journal"
    path.write_bytes(b"FLEXDPJ2" + path.read_bytes()[8:])


def _newer_history(state: Path) -> None:
    with closing(sqlite3.connect(state / "migrations.sqlite")) as database:
        database.execute("PRAGMA user_version = 2")


def _newer_decisions(state: Path) -> None:
    path = state / "decisions.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2, "quorum": 3}))


def _newer_plans(state: Path) -> None:
    with (state / "plans.jsonl").open("a") as file:
        file.write(json.dumps({"format": 2, "plan": {}}) + "\n")


def _newer_offsets(state: Path) -> None:
    (state / "poison-offsets.json").write_text(json.dumps({"format": 2, "ranges": []}))


def _newer_tables(state: Path) -> None:
    (state / "tables-of-ranks.json").write_text(json.dumps({"format": 2, "tables": [], "columns": {}}))


OPENERS: dict[str, tuple[Callable[[Path], None], Callable[[Path], object]]] = {
    "placement/placement.journal": (_newer_journal, lambda state: PlacementJournal(state / "placement")),
    "migrations.sqlite": (
        _newer_history, lambda state: HistoryStore(state / "migrations.sqlite", 5, lambda _: None).open(),
    ),
    "decisions.json": (_newer_decisions, lambda state: DecisionFile(state / "decisions.json")),
    "plans.jsonl": (_newer_plans, lambda state: PlanLog(state / "plans.jsonl")),
    "poison-offsets.json": (_newer_offsets, OffsetsInWork),
    "tables-of-ranks.json": (_newer_tables, load_tables),
}  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_newer_file_is_refused_by_name_and_unchanged(state: Path, file) -> None:
    make_newer, read = OPENERS[file.name]
    make_newer(state)
    before = (state / file.name).read_bytes()
    with pytest.raises(StateVersionError, match=f"{file.name}.*newer flexd"):
        read(state)
    with pytest.raises(UnusableStateError, match=f"{file.name}.*newer flexd"):
        check_files(state, start_empty=False)
    assert (state / file.name).read_bytes() == before
    check_files(state, start_empty=True)
    assert not (state / file.name).exists()
    assert (state / f"{file.name}.newer").read_bytes() == before


def test_all_newer_files_are_named_together(state: Path) -> None:
    for make_newer, _ in OPENERS.values():
        make_newer(state)
    with pytest.raises(UnusableStateError) as error:
        check_files(state, start_empty=False)
    assert all(name in error.value.message for name in OPENERS)


def test_a_file_that_is_no_journal_is_kept(tmp_path: Path) -> None:
    """A journal is truncated only behind its last whole record."""
    path = tmp_path / "placement.journal"
    path.write_bytes(b"something else entirely")
    journal = PlacementJournal(tmp_path)
    assert (journal.segment, journal.truncated_bytes) == (None, 23)
    assert (tmp_path / "placement.journal.unusable").read_bytes() == b"something else entirely"


def _assert_counts(sketches: SketchSet, wanted: dict) -> None:
    rows = np.arange(0, 120, 2, dtype=np.int64)
    assert list(sketches.samples_by_table()) == wanted["samples"]
    assert sketches.newest_event_seconds == wanted["newest"]
    assert [choice.kind for choice in sketches.choices()] == wanted["kinds"]
    for table in TABLES:
        assert [float(x).hex() for x in sketches.query(table.name, rows)] == wanted["estimates"][table.name]
    assert [float(x) for x in sketches.sequence_length_quantiles("clicks", [0.5])] == wanted["lengths"]


def test_an_ingest_continues_an_old_snapshot(state: Path, expected: dict) -> None:
    from tests.support.ingest_fakes import FakeSource, run_to_the_end

    wanted = expected["snapshots"]["logarithmic"]
    source = FakeSource({"p0": [b""] * wanted["positions"]["p0"]} if "p0" in wanted["positions"] else {})
    store = SnapshotStore(state / "logarithmic" / "snapshots", 2)
    ingestor = Ingestor(source, TABLES, SETTINGS["logarithmic"], store, poll_seconds=0.01, save_in_background=False)
    run_to_the_end(ingestor, source)
    assert source.restored == wanted["positions"]
