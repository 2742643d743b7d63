"""Dead letters: bounded files in which rare reasons survive."""

from __future__ import annotations

import json

from flexd.ingest.dead_letters import SAMPLES_OF_EACH_REASON, DeadLetterFile
from flexd.stream.types import Message


def test_dead_letters_are_bounded_and_rare_reasons_survive(tmp_path):
    path = tmp_path / "deep" / "dead.jsonl"
    letters = DeadLetterFile(path, 40_000, 100)
    for i in range(10_000):
        letters.record("frequent", "x" * 1000, Message("p", i, bytes(5000)))
    letters.record("rare", "", Message("p", 1, memoryview(b"abc")))
    files = list(path.parent.iterdir())
    assert sum(file.stat().st_size for file in files) <= 40_000
    reasons = [json.loads(line)["reason"] for file in files for line in file.read_text().splitlines()]
    assert letters.written == SAMPLES_OF_EACH_REASON + len([7, 8, 9, 10, 11, 12, 13]) + 1
    assert reasons.count("rare") == 1
    for i in range(3000):
        letters.record(f"r{i}", "x" * 200, Message("p", i, bytes(100)))
    assert sum(file.stat().st_size for file in path.parent.iterdir()) <= 40_000
    unwritable = DeadLetterFile(path / "no-directory", 40_000, 100)
    unwritable.record("r", "", Message("p", 0, b""))
    assert (unwritable.written, unwritable.failures) == (0, 1)
    none = DeadLetterFile(tmp_path / "none", 0, 100)
    none.record("r", "", Message("p", 0, b""))
    assert not (tmp_path / "none").exists()
