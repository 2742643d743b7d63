"""A message that kills its reader is skipped at the third start; everything else is counted exactly once."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np

from flexd.core.keyspace import TableSpec
from flexd.sketch import ingestor as ingestor_module
from flexd.sketch.ingestor import DeadLetterFile, Ingestor
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.table_sketch import SketchSettings
from flexd.stream.codec import encode_arrow
from flexd.stream.file_log.log import FileLogSource
from flexd.stream.offsets_in_work import OffsetsInWork
from flexd.stream.types import AccessBatch
from tests.support.file_log import write
from tests.support.until import until


def count(state: Path) -> None:
    """Count all messages in a child process, which one of them kills."""
    decode_message = ingestor_module.decode_message

    def decode(payload, limit):
        if bytes(payload) == b"poison":
            os.kill(os.getpid(), signal.SIGKILL)
        return decode_message(payload, limit)

    ingestor_module.decode_message = decode
    ingestor = Ingestor(
        FileLogSource(state / "log"), [TableSpec("t", 20, 4)], SketchSettings(2**20, None),
        SnapshotStore(state / "snapshots", 2), dead_letters=DeadLetterFile(state / "dead", 10_000, 100),
        snapshot_interval_seconds=0.01, poll_seconds=0.01, work=OffsetsInWork(state),
    )  # fmt: skip
    ingestor.start()
    until(lambda: ingestor.counter.messages >= 20)
    ingestor.stop(20)
    counts = ingestor.sketches.query("t", np.arange(20)).tolist()
    (state / "result").write_text(json.dumps([counts, ingestor.counter.rejected]))


def test_a_message_that_kills_its_reader_twice_is_skipped_counted_and_kept_as_a_dead_letter(tmp_path):
    messages = [encode_arrow([AccessBatch("t", np.array([number], np.int32), 0, 1e9)]) for number in range(20)]
    messages[7] = b"poison"
    write(tmp_path / "log", messages)
    ends = []
    for _ in range(3):
        process = multiprocessing.get_context("fork").Process(target=count, args=(tmp_path,))
        process.start()
        process.join(100)
        ends.append(process.exitcode)
    assert ends == [-signal.SIGKILL, -signal.SIGKILL, os.EX_OK]
    counts, rejected = json.loads((tmp_path / "result").read_text())
    assert rejected == {"poison_offset": 1}
    assert counts == [1.0] * 7 + [0.0] + [1.0] * 12
    letter = json.loads((tmp_path / "dead").read_text())
    assert (letter["reason"], letter["partition"], letter["offset"]) == ("poison_offset", "p", 7)
