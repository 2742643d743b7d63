"""The plan log after crashes, on a full disk, and at its size limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexd.core.errors import SnapshotError
from flexd.operations import plan_log
from flexd.operations.plan_log import PlanLog


def test_entries_are_kept_over_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    log = PlanLog(path)
    assert log.newest is None
    log.append({"plan_id": "a"})
    log.append({"plan_id": "b", "rows": 3})
    assert PlanLog(path).entries == [{"plan_id": "a"}, {"plan_id": "b", "rows": 3}]
    assert PlanLog(path).newest == {"plan_id": "b", "rows": 3}
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("torn", ['{"plan_id": "c"', '{"plan_id": "c", "ro', "{", "[1]", "\0\0\0\0"])
def test_a_torn_line_is_ignored_and_later_lines_are_kept(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "plans.jsonl"
    path.write_text('{"plan_id": "a"}\n' + torn)
    log = PlanLog(path)
    assert log.entries == [{"plan_id": "a"}]
    log.append({"plan_id": "d"})
    assert PlanLog(path).entries == [{"plan_id": "a"}, {"plan_id": "d"}]


def test_file_and_memory_are_bounded_and_keep_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_log, "MAX_ENTRIES", 5)
    path = tmp_path / "plans.jsonl"
    log = PlanLog(path)
    for number in range(43):
        log.append({"plan_id": number})
        assert len(log.entries) <= 10
        assert len(path.read_text().splitlines()) <= 10
        assert PlanLog(path).newest == {"plan_id": number}
    numbers = [json.loads(line)["plan_id"] for line in path.read_text().splitlines()]
    assert numbers == list(range(numbers[0], 43))
    assert len(PlanLog(path).entries) == 5
    # A restarted daemon also counts the entries already in the file.
    for number in range(43, 80):
        PlanLog(path).append({"plan_id": number})
        assert len(path.read_text().splitlines()) <= 10


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "plans.jsonl").mkdir()
    with pytest.raises(SnapshotError, match=r"plans\.jsonl"):
        PlanLog(tmp_path / "plans.jsonl")
    log = PlanLog(tmp_path / "missing" / "plans.jsonl")
    with pytest.raises(SnapshotError, match="plan log"):
        log.append({"plan_id": "a"})
    (tmp_path / "missing").mkdir()
    log.append({"plan_id": "b"})
    assert PlanLog(tmp_path / "missing" / "plans.jsonl").entries == [{"plan_id": "a"}, {"plan_id": "b"}]
