"""Offsets at which the process died twice are skipped; one death, or success in between, skips nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flexd.core.errors import StateVersionError
from flexd.stream import offsets_in_work
from flexd.stream.offsets_in_work import RECORD_NAME, OffsetsInWork
from tests.support.repository import ROOT, child_environment


def die_at(directory: Path, partition: str, first: int, last: int, *, counting: bool = False) -> None:
    """Begin without an end, as a killed process leaves it."""
    OffsetsInWork(directory).begin(partition, first, last, counting=counting)


def skips(directory: Path) -> list[tuple[str, int, int]]:
    work = OffsetsInWork(directory)
    work.close()
    return [(item.partition, item.first, item.last) for item in work.skipped()]


def test_a_range_is_skipped_after_the_second_death_in_a_row(tmp_path):
    die_at(tmp_path, "t/0", 5, 9)
    assert skips(tmp_path) == []
    die_at(tmp_path, "t/0", 5, 9)
    assert skips(tmp_path) == [("t/0", 5, 9)]
    work = OffsetsInWork(tmp_path)
    assert not work.begin("t/0", 5, 9)
    assert work.begin("t/0", 5, 8)
    assert work.begin("t/1", 5, 9)
    assert work.begin("t/0", 5, 9, counting=True)
    work.close()


@pytest.mark.parametrize("onwards", [lambda work: work.end(), lambda work: work.begin("t/0", 10, 12)])
def test_success_between_two_deaths_forgets_the_first(tmp_path, onwards):
    die_at(tmp_path, "t/0", 5, 9)
    work = OffsetsInWork(tmp_path)
    assert work.begin("t/0", 5, 9)
    onwards(work)
    work.close()
    die_at(tmp_path, "t/0", 5, 9)
    assert skips(tmp_path) == []


def test_a_batch_that_is_read_does_not_hide_its_message_that_kills(tmp_path):
    for _ in range(2):
        work = OffsetsInWork(tmp_path)
        work.begin("t/0", 5, 5)
        work.end()
        work.begin("t/0", 5, 5, counting=True)
    work = OffsetsInWork(tmp_path)
    assert work.begin("t/0", 5, 5)
    assert not work.begin("t/0", 5, 5, counting=True)


def test_a_skipped_range_stays_skipped_and_is_forgotten_after_a_week(tmp_path, monkeypatch):
    for _ in range(2):
        die_at(tmp_path, "t/0", 5, 9)
    assert skips(tmp_path) == skips(tmp_path) == [("t/0", 5, 9)]
    monkeypatch.setattr(offsets_in_work, "_FORGET_SECONDS", -1.0)
    assert skips(tmp_path) == []


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"format": 0, "offsets": []}', b'{"format": 1, "offsets": [3]}'])
def test_a_damaged_record_is_quarantined(tmp_path, text):
    (tmp_path / RECORD_NAME).write_bytes(text)
    assert skips(tmp_path) == []
    assert (tmp_path / f"{RECORD_NAME}.unusable").read_bytes() == text


def test_a_record_of_a_newer_flexd_is_refused_and_unchanged(tmp_path):
    text = b'{"format": 2, "offsets": []}'
    (tmp_path / RECORD_NAME).write_bytes(text)
    with pytest.raises(StateVersionError, match=f"{RECORD_NAME} is of format 2, of a newer flexd"):
        OffsetsInWork(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [RECORD_NAME]
    assert (tmp_path / RECORD_NAME).read_bytes() == text


def test_without_a_directory_or_with_one_that_cannot_be_written_nothing_is_skipped(tmp_path):
    for work in (OffsetsInWork(), OffsetsInWork(tmp_path / "missing")):
        assert work.begin("t/0", 1, 1)
        work.end()
        assert work.skipped() == ()
        work.close()


_DIES = """
import sys, os, signal
from pathlib import Path
from flexd.stream.offsets_in_work import OffsetsInWork
work = OffsetsInWork(Path(sys.argv[1]))
for offset in range(100):
    if work.begin("t/0", offset, offset, counting=True) and offset == 42:
        os.kill(os.getpid(), signal.SIGKILL)
work.close()
"""


def test_the_mark_survives_a_kill(tmp_path):
    codes = [
        subprocess.run([sys.executable, "-c", _DIES, str(tmp_path)], env=child_environment(), cwd=ROOT, check=False)
        for _ in range(3)
    ]
    assert [done.returncode for done in codes] == [-signal.SIGKILL, -signal.SIGKILL, os.EX_OK]
    assert skips(tmp_path) == [("t/0", 42, 42)]
