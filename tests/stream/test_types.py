"""Offsets at which the process died twice are skipped; one death, or success in between, skips nothing."""

from pathlib import Path

import pytest

from flexd.stream import types
from flexd.stream.types import FILE_NAME, OffsetsInWork


def die_at(directory: Path, partition: str, first: int, last: int, *, counting: bool = False) -> None:
    """Begin without an end, as a killed process leaves it."""
    OffsetsInWork(directory).begin(partition, first, last, counting=counting)


def skips(directory: Path) -> bool:
    work = OffsetsInWork(directory)
    skipped = not work.begin("t/0", 5, 9)
    work.close()
    return skipped


def test_a_range_is_skipped_after_the_second_death_in_a_row_until_a_week_has_passed(tmp_path, monkeypatch):
    die_at(tmp_path, "t/0", 5, 9)
    die_at(tmp_path, "t/0", 5, 9)
    assert skips(tmp_path)
    work = OffsetsInWork(tmp_path)
    assert not work.begin("t/0", 5, 9)
    assert work.begin("t/0", 5, 8)
    assert work.begin("t/1", 5, 9)
    assert work.begin("t/0", 5, 9, counting=True)
    work.begin("t/0", 1, 4)
    assert not work.begin("t/0", 5, 9)
    assert skips(tmp_path)
    assert b"1 4" not in (tmp_path / FILE_NAME).read_bytes()[512:], (
        "a death after a skipped range is not of the one before"
    )
    monkeypatch.setattr(types, "_FORGET_SECONDS", -1.0)
    assert not skips(tmp_path)


@pytest.mark.parametrize(
    "onwards", [lambda work: work.end(), lambda work: work.begin("t/0", 10, 12)], ids=("end", "next")
)
def test_success_between_two_deaths_forgets_the_first(tmp_path, onwards):
    die_at(tmp_path, "t/0", 5, 9)
    work = OffsetsInWork(tmp_path)
    assert work.begin("t/0", 5, 9)
    onwards(work)
    work.close()
    die_at(tmp_path, "t/0", 5, 9)
    assert not skips(tmp_path)


def test_a_batch_that_is_read_does_not_hide_its_message_that_kills(tmp_path):
    for _ in range(2):
        work = OffsetsInWork(tmp_path)
        work.begin("t/0", 5, 5)
        work.end()
        work.begin("t/0", 5, 5, counting=True)
    work = OffsetsInWork(tmp_path)
    assert work.begin("t/0", 5, 5)
    assert not work.begin("t/0", 5, 5, counting=True)


@pytest.mark.parametrize(
    "text", [b"", b"9", b"9 9999999999", b"\xff 9999999999 t/0 5 9 read\n", b"-9 9999999999 t/0 5 9 read\n"]
)
def test_a_damaged_record_and_a_directory_that_cannot_be_written_skip_nothing(tmp_path, text):
    (tmp_path / FILE_NAME).write_bytes(bytes(512) + text)
    for work in (OffsetsInWork(tmp_path), OffsetsInWork(), OffsetsInWork(tmp_path / "missing")):
        assert work.begin("t/0", 5, 9)
        work.close()
