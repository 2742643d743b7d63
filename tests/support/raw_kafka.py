"""Record batches built byte by byte, and sent to a broker as they are: what a hostile producer can do."""

from __future__ import annotations

import gzip
import socket
import struct
from collections.abc import Callable, Sequence

import lz4.frame
import snappy
import zstandard
from crc32c import crc32c
from kafka.codec import snappy_encode

CODECS: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "gzip": (1, gzip.compress),
    "snappy": (2, snappy.compress),
    "snappy-xerial": (2, snappy_encode),
    "lz4": (3, lz4.frame.compress),
    "zstd": (4, zstandard.ZstdCompressor().compress),
}
"""Name -> (code in a batch's attributes, compressor)."""
LOG_APPEND_TIME = 0x08


def varint(value: int) -> bytes:
    """Encode a zig-zag varint."""
    raw, out = (value << 1) ^ (value >> 63), bytearray()
    while raw >= 0x80:
        out.append(raw & 0x7F | 0x80)
        raw >>= 7
    out.append(raw)
    return bytes(out)


def record(delta: int, value: bytes | None, time_delta: int = 0, headers: bytes = b"\x00") -> bytes:
    """Encode one record of format 2 without a key."""
    body = b"\x00" + varint(time_delta) + varint(delta) + varint(-1)
    body += varint(-1) if value is None else varint(len(value)) + value
    body += headers
    return varint(len(body)) + body


def batch(
    values: Sequence[bytes] = (),
    *,
    codec: str | None = None,
    records: bytes | None = None,
    count: int | None = None,
    last_delta: int | None = None,
    compressed: bytes | None = None,
    timestamp_ms: int = 1_700_000_000_000,
    attributes: int = 0,
    crc: int | None = None,
    base_offset: int = 0,
) -> bytes:
    """Encode a record batch of format 2; every field can be set to something that does not fit the others."""
    if records is None:
        records = b"".join(record(delta, value) for delta, value in enumerate(values))
    count = len(values) if count is None else count
    last_delta = max(count - 1, 0) if last_delta is None else last_delta
    if codec is not None:
        code, compress = CODECS[codec]
        attributes |= code
        records = compress(records) if compressed is None else compressed
    body = struct.pack(
        ">hiqqqhii", attributes, last_delta, timestamp_ms, timestamp_ms, -1, -1, -1, count
    ) + records  # fmt: skip
    crc = crc32c(body) if crc is None else crc
    return struct.pack(">qiibI", base_offset, len(body) + 9, 0, 2, crc) + body


def produce(bootstrap: str, topic: str, batch: bytes, partition: int = 0) -> int:
    """Send one batch (Produce version 3). Return the broker's error code."""
    host, port = bootstrap.split(":")

    def text(value: str | None) -> bytes:
        return struct.pack(">h", -1) if value is None else struct.pack(">h", len(value)) + value.encode()

    request = struct.pack(">hhi", 0, 3, 1) + text("raw") + text(None) + struct.pack(">hi", 1, 10_000)
    request += struct.pack(">i", 1) + text(topic) + struct.pack(">iii", 1, partition, len(batch)) + batch
    with socket.create_connection((host, int(port)), 10.0) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", _read(connection, 4))
        response = _read(connection, size)
    at = 4 + 4 + 2 + len(topic) + 4 + 4
    (error,) = struct.unpack_from(">h", response, at)
    return int(error)


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        assert part, "the broker closed the connection"
        data += part
    return data
