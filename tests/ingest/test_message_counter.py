"""Decoding and counting of messages, and rejections by reason."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from flexd.ingest.dead_letters import DeadLetterFile
from flexd.sketch.snapshot import SnapshotStore
from flexd.stream.codecs.codec import decode, encode_arrow
from flexd.stream.types import AccessBatch
from tests.support.ingest_fakes import (
    T0,
    FakeSource,
    make_ingestor,
    run_to_the_end,
)


def test_bad_input_is_counted_by_reason_and_sampled(tmp_path):
    def odd(payload, limit):
        if payload == b"crash":
            raise RuntimeError("a bug")
        return decode(payload, limit)

    good = [AccessBatch("small", np.array([-1, 3, 200, 3], dtype=np.int32), 0, T0)]
    unknown = [AccessBatch("who", np.arange(5, dtype=np.int32), 0, T0)]
    bad = [b"crash", b"\xff\xff\xff\xff\x10", b"{bad", encode_arrow(unknown), b"x" * 5000, b"", b"{bad"]
    log = {"p": [encode_arrow(good), *bad, encode_arrow(good)]}
    source = FakeSource(log)
    letters = DeadLetterFile(tmp_path / "dead.jsonl", 100_000, 64)
    ingestor = make_ingestor(
        source, SnapshotStore(tmp_path, 1), decode=odd, max_message_bytes=4096, dead_letters=letters
    )
    run_to_the_end(ingestor, source)
    stats = ingestor.stats()
    assert stats.messages == 9
    assert stats.bytes == sum(len(message) for message in log["p"])
    assert stats.rejected_messages == {"internal_error": 1, "corrupt": 1, "bad_json": 2, "too_large": 1, "empty": 1}
    assert stats.rejected_accesses == {"unknown_table": 5, "negative_row": 2, "row_out_of_range": 2}
    assert stats.accesses == 4
    assert ingestor.sketches.query("small", np.array([3])).tolist() == pytest.approx([4.0])
    lines = [json.loads(line) for line in (tmp_path / "dead.jsonl").read_text().splitlines()]
    assert stats.dead_letters == len(lines) == 11
    large = next(line for line in lines if line["reason"] == "too_large")
    assert (large["partition"], large["offset"], large["size"]) == ("p", 5, 5000)
    assert base64.b64decode(large["first_bytes"]) == b"x" * 64
    assert (tmp_path / "dead.jsonl").stat().st_mode & 0o777 == 0o600
