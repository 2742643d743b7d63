"""Decompress record batches in steps that end at a bound.

kafka-python decompresses a batch as a whole: 300 kB of gzip become as many bytes as the producer wants. Here every
codec stops at ``max_bytes``, before more than one step beyond it is allocated.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
"""Codes in a batch's attributes (``CODEC_MASK``)."""
CODEC_MASK = 0x07
CODEC_NAMES = ("none", "gzip", "snappy", "lz4", "zstd")
STEP_BYTES = 2**20
HEAD_BYTES = 4096
_GZIP_WINDOW = 31
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


def decompress(codec: int, data: memoryview, max_bytes: int) -> bytes | bytearray:
    """Decompress a batch's records.

    Raises:
        BatchRefusedError: they are larger than ``max_bytes`` (``batch_too_large``), damaged (``corrupt_batch``), or of
            an unknown codec (``unsupported_codec``).
    """
    decoder = _DECODERS.get(codec)
    if decoder is None:
        raise BatchRefusedError("unsupported_codec", f"compression codec {codec}")
    try:
        return decoder(data, max_bytes)
    except BatchRefusedError:
        raise
    except ImportError as error:
        raise BatchRefusedError("unsupported_codec", f"{CODEC_NAMES[codec]}: {error}; install flexd[daemon]") from error
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        # Each library has exceptions of its own.
        raise BatchRefusedError("corrupt_batch", f"{CODEC_NAMES[codec]}: {error}"[:200]) from error


def _check(out: bytearray, max_bytes: int) -> None:
    if len(out) > max_bytes:
        raise BatchRefusedError("batch_too_large", f"over {max_bytes} bytes decompressed", bytes(out[:HEAD_BYTES]))


def _gzip(data: memoryview, max_bytes: int) -> bytearray:
    out, rest = bytearray(), bytes(data)
    while True:
        member = zlib.decompressobj(_GZIP_WINDOW)
        while not member.eof:
            part = member.decompress(rest, min(STEP_BYTES, max_bytes + 1 - len(out)))
            out += part
            _check(out, max_bytes)
            if not part and not member.unconsumed_tail and not member.eof:
                raise BatchRefusedError("corrupt_batch", "gzip: truncated", bytes(out[:HEAD_BYTES]))
            rest = member.unconsumed_tail
        rest = member.unused_data.lstrip(b"\0")
        if not rest:
            return out


def _snappy(data: memoryview, max_bytes: int) -> bytes | bytearray:
    import snappy

    if bytes(data[:8]) != _XERIAL_MAGIC:
        _check_snappy_length(data, max_bytes, bytearray())
        raw: bytes = snappy.decompress(bytes(data))
        return raw
    out, at = bytearray(), _XERIAL_HEADER_BYTES
    while at < len(data):
        (size,) = struct.unpack_from(">i", data, at)
        block = data[at + 4 : at + 4 + size]
        if size <= 0 or len(block) != size:
            raise BatchRefusedError("corrupt_batch", "snappy: block length", bytes(out[:HEAD_BYTES]))
        _check_snappy_length(block, max_bytes, out)
        out += snappy.decompress(bytes(block))
        at += 4 + size
    return out


def _check_snappy_length(block: memoryview, max_bytes: int, out: bytearray) -> None:
    """Check the length that a snappy block declares; the decoder allocates exactly that."""
    length = shift = 0
    for byte in block[:5]:
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            if len(out) + length > max_bytes:
                raise BatchRefusedError(
                    "batch_too_large", f"over {max_bytes} bytes decompressed", bytes(out[:HEAD_BYTES])
                )
            return
    raise BatchRefusedError("corrupt_batch", "snappy: no length")


def _lz4(data: memoryview, max_bytes: int) -> bytearray:
    import lz4.frame

    out, rest = bytearray(), bytes(data)
    while rest:
        frame = lz4.frame.LZ4FrameDecompressor()
        while not frame.eof:
            part = frame.decompress(rest, min(STEP_BYTES, max_bytes + 1 - len(out)))
            out += part
            _check(out, max_bytes)
            rest = b""
            if not part and frame.needs_input:
                raise BatchRefusedError("corrupt_batch", "lz4: truncated", bytes(out[:HEAD_BYTES]))
        rest = frame.unused_data or b""
    return out


def _zstd(data: memoryview, max_bytes: int) -> bytearray:
    import zstandard

    # A decoder allocates the window that the frame claims, 128 MiB by default.
    window = max(_MIN_ZSTD_WINDOW_BYTES, 1 << (max_bytes - 1).bit_length())
    decompressor = zstandard.ZstdDecompressor(max_window_size=window)
    out = bytearray()
    with decompressor.stream_reader(bytes(data), read_across_frames=True) as reader:
        while part := reader.read(min(STEP_BYTES, max_bytes + 1 - len(out))):
            out += part
            _check(out, max_bytes)
    return out


_DECODERS: dict[int, Callable[[memoryview, int], bytes | bytearray]] = {
    GZIP: _gzip,
    SNAPPY: _snappy,
    LZ4: _lz4,
    ZSTD: _zstd,
}
