"""A message that kills its reader is skipped at the third start; everything else is counted exactly once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from tests.support.repository import ROOT, child_environment

_DAEMON = """
import json, os, signal, sys, time
from pathlib import Path
import numpy as np
from flexd.core.keyspace import TableSpec
from flexd.sketch.ingestor import Ingestor
from flexd.sketch.dead_letters import DeadLetterFile
from flexd.sketch import ingestor as ingestor_module
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.types import SketchSettings
from flexd.stream.codec import encode_arrow
from flexd.stream.file_log.log import FileLogSink, FileLogSource
from flexd.stream.offsets_in_work import OffsetsInWork
from flexd.stream.types import AccessBatch

state = Path(sys.argv[1])
log = state / "log"
if not log.exists():
    sink = FileLogSink(log, "0")
    for number in range(20):
        payload = encode_arrow([AccessBatch("t", np.array([number], np.int32), 0, 1e9)])
        sink.send(payload if number != 7 else b"poison")
    sink.close()

decode_message = ingestor_module.decode_message

def decode(payload, limit):
    if bytes(payload) == b"poison":
        os.kill(os.getpid(), signal.SIGKILL)
    return decode_message(payload, limit)

ingestor_module.decode_message = decode

ingestor = Ingestor(
    FileLogSource(log), [TableSpec("t", 20, 4)], SketchSettings(2**20, None), SnapshotStore(state / "snapshots", 2),
    dead_letters=DeadLetterFile(state / "dead", 10_000, 100), snapshot_interval_seconds=0.01, poll_seconds=0.01,
    work=OffsetsInWork(state),
)
ingestor.start()
deadline = time.monotonic() + 60
while ingestor.counter.messages < 20:
    assert time.monotonic() < deadline
    time.sleep(0.01)
ingestor.stop(20)
counts = ingestor.sketches.query("t", np.arange(20)).tolist()
print(json.dumps({"counts": counts, "rejected": ingestor.counter.rejected}))
"""


def test_a_message_that_kills_its_reader_twice_is_skipped_counted_and_kept_as_a_dead_letter(tmp_path):
    runs = [
        subprocess.run(
            [sys.executable, "-c", _DAEMON, str(tmp_path)],
            env=child_environment(), cwd=ROOT, check=False, capture_output=True, timeout=100,
        )
        for _ in range(3)
    ]  # fmt: skip
    assert [run.returncode for run in runs] == [-signal.SIGKILL, -signal.SIGKILL, os.EX_OK], runs[-1].stderr
    result = json.loads(runs[-1].stdout)
    assert result["rejected"] == {"poison_offset": 1}
    assert result["counts"] == [1.0] * 7 + [0.0] + [1.0] * 12
    letter = json.loads((tmp_path / "dead").read_text())
    assert (letter["reason"], letter["partition"], letter["offset"]) == ("poison_offset", "0", 7)
