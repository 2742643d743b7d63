"""Decompression that stops at a bound: every codec, damaged and truncated data, memory."""

from __future__ import annotations

import gzip
import random
import struct
import subprocess
import sys

import pytest

from flexd.stream.kafka.bounded_fetcher import HEAD_BYTES, BatchRefusedError, decompress
from tests.support.raw_kafka import CODECS
from tests.support.repository import ROOT, child_environment

DATA = random.Random(1).randbytes(300_000) + b"a" * 3_000_000


@pytest.mark.parametrize("codec", CODECS)
def test_one_byte_over_the_bound_is_refused_with_the_head(codec):
    code, compress = CODECS[codec]
    with pytest.raises(BatchRefusedError, match="over 3299999 bytes") as refused:
        decompress(code, memoryview(compress(DATA)), len(DATA) - 1)
    assert refused.value.reason == "batch_too_large"
    assert DATA.startswith(refused.value.head)
    assert len(refused.value.head) <= HEAD_BYTES


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "flipped"])
def test_damaged_data_is_refused_or_differs(codec, damage):
    """Some codecs have no checksum and no end mark; the records' own lengths then tell."""
    code, compress = CODECS[codec]
    data = bytearray(compress(DATA))
    if damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "garbage":
        data = bytearray(b"\x82SNAPPY\x00" + bytes(range(100))) if codec == "snappy-xerial" else bytearray(b"garbage")
    elif damage == "empty":
        data = bytearray()
    else:
        data[len(data) // 2] ^= 0x55
    refused, result = None, b""
    try:
        result = decompress(code, memoryview(bytes(data)), len(DATA))
    except BatchRefusedError as error:
        refused = error.reason
    assert refused in (None, "corrupt_batch", "batch_too_large")
    assert bytes(result) != DATA


def test_gzip_members_in_a_row_count_together():
    data = gzip.compress(b"a" * 60) + gzip.compress(b"b" * 60) + b"\0\0"
    assert bytes(decompress(1, memoryview(data), 120)) == b"a" * 60 + b"b" * 60
    with pytest.raises(BatchRefusedError, match="over 119"):
        decompress(1, memoryview(data), 119)


def test_snappy_blocks_that_claim_more_than_they_hold_are_refused_before_they_are_allocated():
    claim = b"\xff\xff\xff\xff\x0f"
    for data in (claim, b"\x82SNAPPY\x00" + bytes(8) + struct.pack(">i", 5) + claim):
        with pytest.raises(BatchRefusedError) as refused:
            decompress(2, memoryview(data), 1000)
        assert refused.value.reason == "batch_too_large"
    for size in (-1, 0, 2**31 - 1):
        with pytest.raises(BatchRefusedError) as refused:
            decompress(2, memoryview(b"\x82SNAPPY\x00" + bytes(8) + struct.pack(">i", size)), 1000)
        assert refused.value.reason == "corrupt_batch"


_MEASURE = """
import sys
from pathlib import Path
from flexd.stream.kafka.bounded_fetcher import BatchRefusedError, decompress
import lz4.frame, snappy, zstandard
def peak():
    # Not getrusage, whose maximum starts with that of the parent.
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1])
for path in sys.argv[1:]:
    data = memoryview(Path(path).read_bytes())
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    try:
        decompress(int(Path(path).name[0]), data, 16 * 2**20)
        raise SystemExit("not refused")
    except BatchRefusedError as error:
        assert error.reason == "batch_too_large", error
    print((peak() - before) // 1024)
"""


def test_a_bomb_costs_no_more_than_twice_the_bound(tmp_path):
    bombs = [tmp_path / f"{code} {name}" for name, (code, _) in CODECS.items()]
    for bomb, (_, compress) in zip(bombs, CODECS.values(), strict=True):
        bomb.write_bytes(compress(bytes(80 * 2**20)))
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *map(str, bombs)],
        capture_output=True, check=True, env=child_environment(), cwd=ROOT,
    )  # fmt: skip
    for bomb, mebibytes in zip(bombs, done.stdout.split(), strict=True):
        assert int(mebibytes) <= 2 * 16 + 2 * bomb.stat().st_size // 2**20 + 8, bomb.name
