"""Decompress record batches in steps that end at a bound.

kafka-python decompresses a batch as a whole: 300 kB of gzip become as many bytes as the producer wants. Here every
codec stops at ``max_bytes``, before more than one step beyond it is allocated.
"""

from __future__ import annotations

import gzip
import io
import struct
from collections.abc import Callable, Iterator
from typing import Any

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
"""Codes in a batch's attributes (``CODEC_MASK``)."""
CODEC_MASK = 0x07
CODEC_NAMES = ("none", "gzip", "snappy", "lz4", "zstd")
STEP_BYTES = 2**20
HEAD_BYTES = 4096
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16
_MIN_ZSTD_WINDOW_BYTES = 8 * 2**20
"""Windows up to this size are accepted whatever the bound is: ordinary compression levels use them."""


class BatchRefusedError(Exception):
    """A record batch is not read.

    Attributes:
        reason: one of ``flexd.stream.types.REFUSAL_REASONS``.
        head: first decompressed bytes, if there are any.
    """

    def __init__(self, reason: str, detail: str, head: bytes = b"") -> None:
        super().__init__(detail)
        self.reason = reason
        self.head = head


def decompress(codec: int, data: memoryview, max_bytes: int) -> bytearray:
    """Decompress a batch's records.

    Raises:
        BatchRefusedError: they are larger than ``max_bytes`` (``batch_too_large``), damaged (``corrupt_batch``), or of
            an unknown codec (``unsupported_codec``).
    """
    if codec not in _PARTS:
        raise BatchRefusedError("unsupported_codec", f"compression codec {codec}")
    out = bytearray()
    try:
        for part in _PARTS[codec](data, max_bytes):
            out += part
            if len(out) > max_bytes:
                raise _too_large(max_bytes)
    except ImportError as error:
        raise BatchRefusedError("unsupported_codec", f"{CODEC_NAMES[codec]}: {error}; install flexd[daemon]") from error
    except BatchRefusedError as error:
        error.head = bytes(out[:HEAD_BYTES])
        raise
    except MemoryError:
        raise
    except Exception as error:
        # Each library has exceptions of its own.
        head = bytes(out[:HEAD_BYTES])
        raise BatchRefusedError("corrupt_batch", f"{CODEC_NAMES[codec]}: {error}"[:200], head) from error
    return out


def _too_large(max_bytes: int) -> BatchRefusedError:
    return BatchRefusedError("batch_too_large", f"over {max_bytes} bytes decompressed")


def _read(reader: Any, max_bytes: int) -> Iterator[bytes]:
    """Read a file-like decompressor in steps; at most one byte beyond the bound."""
    left = max_bytes + 1
    while part := reader.read(min(STEP_BYTES, left)):
        left -= len(part)
        yield part


def _gzip(data: memoryview, max_bytes: int) -> Iterator[bytes]:
    return _read(gzip.GzipFile(fileobj=io.BytesIO(data)), max_bytes)


def _lz4(data: memoryview, max_bytes: int) -> Iterator[bytes]:
    import lz4.frame

    return _read(lz4.frame.LZ4FrameFile(io.BytesIO(data), mode="rb"), max_bytes)


def _zstd(data: memoryview, max_bytes: int) -> Iterator[bytes]:
    import zstandard

    # A decoder allocates the window that the frame claims, 128 MiB by default.
    window = max(_MIN_ZSTD_WINDOW_BYTES, 1 << (max_bytes - 1).bit_length())
    decompressor = zstandard.ZstdDecompressor(max_window_size=window)
    return _read(decompressor.stream_reader(bytes(data), read_across_frames=True), max_bytes)


def _snappy(data: memoryview, max_bytes: int) -> Iterator[bytes]:
    import snappy

    left = max_bytes
    for block in _snappy_blocks(data):
        # The decoder allocates exactly the length that a block declares.
        left -= _snappy_length(block)
        if left < 0:
            raise _too_large(max_bytes)
        yield snappy.decompress(bytes(block))


def _snappy_blocks(data: memoryview) -> Iterator[memoryview]:
    if bytes(data[:8]) != _XERIAL_MAGIC:
        yield data
        return
    at = _XERIAL_HEADER_BYTES
    while at < len(data):
        (size,) = struct.unpack_from(">i", data, at)
        block = data[at + 4 : at + 4 + size]
        if size <= 0 or len(block) != size:
            raise ValueError("block length")
        yield block
        at += 4 + size


def _snappy_length(block: memoryview) -> int:
    length = 0
    for place, byte in enumerate(block[:5]):
        length |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return length
    raise ValueError("no length")


_PARTS: dict[int, Callable[[memoryview, int], Iterator[bytes]]] = {GZIP: _gzip, SNAPPY: _snappy, LZ4: _lz4, ZSTD: _zstd}
