"""Slow rows in a file: packed into checksummed blocks, sparse, read and written in batches."""

from __future__ import annotations

import json
import time
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from flexd.core.errors import SlowMemoryError
from flexd.embedding.store.slow.block_file import PAGE_BYTES, BlockFile, Bytes, Int64Array, aligned_bytes
from flexd.embedding.store.slow.slow_rows import FreshRows, SlowTraffic

_MAGIC = b"flexd slow rows 1\n"
_HEAD_BYTES = 16
"""At the start of a block: uint64 checksum of the rest, uint64 mask of the rows that were written."""
_MAX_ROWS_PER_BLOCK = 64
_WINDOW_BYTES = 16 << 20
"""Blocks that are in memory at once."""
_GOLDEN = 0x9E3779B97F4A7C15
_REMEDY = "remove the file and start again from the checkpoint"


def rows_per_block(row_bytes: int) -> tuple[int, int]:
    """Return (rows of a block, its bytes): one page, or as few as a row needs."""
    block_bytes = -(-(_HEAD_BYTES + row_bytes) // PAGE_BYTES) * PAGE_BYTES
    return min(_MAX_ROWS_PER_BLOCK, (block_bytes - _HEAD_BYTES) // row_bytes), block_bytes


class FileRows:
    """See ``SlowRows``. Row ``slot`` is in block ``slot // rows_per_block``.

    A block that was never written is a hole: it takes no room and is not read. While the file is in use its header
    says so, and other processes are refused; ``save`` records an epoch, with which the file can be opened again until
    it is written. A file that a run left in use holds nothing of worth: a new one takes its place.

    Args:
        identity: what the rows are (tables, seed, optimizer), compared when the file is opened again.
        epoch: of the last ``save``, to open a file; None: make a new one.
        threads: calls in flight.
        deadline_seconds: of a batch of blocks.

    Raises:
        SlowMemoryError: the file is saved, another's or in use, or does not exist; it is of another identity or epoch,
            was in use when its process ended, or cannot be read.
    """

    def __init__(
        self,
        path: Path,
        rows: int,
        row_bytes: int,
        fresh: FreshRows,
        *,
        identity: str = "",
        epoch: int | None = None,
        threads: int = 32,
        deadline_seconds: float = 60.0,
    ) -> None:
        self._rows, self._row_bytes, self._fresh = rows, row_bytes, fresh
        self._per_block, block_bytes = rows_per_block(row_bytes)
        blocks = -(-rows // self._per_block)
        self._file = BlockFile(
            path, blocks, block_bytes, create=epoch is None, threads=threads, deadline_seconds=deadline_seconds,
            is_left=_is_left,
        )  # fmt: skip
        self._identity = identity
        self._traffic = SlowTraffic()
        self._window = max(1, _WINDOW_BYTES // block_bytes)
        self._buffer = aligned_bytes(self._window * block_bytes).reshape(self._window, block_bytes)
        self._factors = _odd_factors(block_bytes // 8 - 1)
        self._in_use = True
        try:
            if epoch is None:
                self._written = np.zeros(-(-blocks // 8), dtype=np.uint8)
                self._file.write_header(self._header(epoch=None))
            else:
                self._written = self._reopen(epoch)
                self._in_use = False
        except SlowMemoryError:
            self._file.close()
            raise

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def row_bytes(self) -> int:
        return self._row_bytes

    @property
    def fast_nbytes(self) -> int:
        return self._written.nbytes + self._buffer.nbytes

    @property
    def traffic(self) -> SlowTraffic:
        return self._traffic

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        self._file.check()
        wanted = slots.numpy()
        packed = np.empty((len(wanted), self._row_bytes), dtype=np.uint8)
        made = np.zeros(len(wanted), dtype=np.bool_)
        order, blocks, starts = self._by_block(wanted)
        for first in range(0, len(blocks), self._window):
            of_window = blocks[first : first + self._window]
            bounds = starts[first : first + len(of_window) + 1]
            rows = order[bounds[0] : bounds[-1]]
            at = np.repeat(np.arange(len(of_window)), np.diff(bounds))
            self._load(of_window)
            place = wanted[rows] - of_window[at] * self._per_block
            packed[rows] = self._payload(len(of_window))[at, place]
            made[rows] = (self._masks(len(of_window))[at] >> place.astype(np.uint64)) & np.uint64(1) == 0
        result = torch.from_numpy(packed)
        unwritten = torch.from_numpy(np.flatnonzero(made))
        if len(unwritten):
            result.index_copy_(0, unwritten, self._fresh(slots.index_select(0, unwritten)))
        self._traffic.rows_read += len(wanted)
        self._traffic.rows_made += len(unwritten)
        self._traffic.seconds += time.perf_counter() - began
        return result

    def write(self, slots: torch.Tensor, packed: torch.Tensor) -> None:
        began = time.perf_counter()
        self._file.check()
        if not self._in_use:
            self._file.write_header(self._header(epoch=None))
            self._in_use = True
        given, data = slots.numpy(), packed.numpy()
        order, blocks, starts = self._by_block(given)
        for first in range(0, len(blocks), self._window):
            of_window = blocks[first : first + self._window]
            bounds = starts[first : first + len(of_window) + 1]
            rows = order[bounds[0] : bounds[-1]]
            at = np.repeat(np.arange(len(of_window)), np.diff(bounds))
            self._load(of_window)
            place = given[rows] - of_window[at] * self._per_block
            self._payload(len(of_window))[at, place] = data[rows]
            masks = self._masks(len(of_window))
            np.bitwise_or.at(masks, at, np.uint64(1) << place.astype(np.uint64))
            filled = self._buffer[: len(of_window)]
            filled.view(np.uint64)[:, 0] = self._checksums(filled)
            self._traffic.operations += self._file.write(of_window, filled)
            self._traffic.bytes_written += filled.nbytes
            np.bitwise_or.at(self._written, of_window >> 3, (1 << (of_window & 7)).astype(np.uint8))
        self._traffic.rows_written += len(given)
        self._traffic.seconds += time.perf_counter() - began

    def save(self, epoch: int) -> None:
        """Make what was written durable, as of ``epoch``: until the next write the file can be opened again.

        Which blocks hold rows is kept beside it, in ``PATH.blocks``.
        """
        beside = self._beside()
        try:
            beside.with_suffix(".tmp").write_bytes(self._written.tobytes())
            beside.with_suffix(".tmp").replace(beside)
        except OSError as error:
            raise SlowMemoryError(
                f"{beside}: cannot be written: {error.strerror}", remedy="look at its disk"
            ) from error
        self._file.write_header(self._header(epoch=epoch))
        self._in_use = False

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """Close the file, and remove what is not saved."""
        self.close()
        if self._in_use:
            for path in (self._file.path, self._beside()):
                path.unlink(missing_ok=True)

    def _by_block(self, slots: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return (order of the slots by block, distinct blocks, where each begins in it, and the end)."""
        if len(slots) and not 0 <= slots.min() <= slots.max() < self._rows:
            raise SlowMemoryError(f"{self._file.path}: slots beyond its {self._rows} rows", remedy="report this")
        order = np.argsort(slots, kind="stable")
        of_slots = slots[order] // self._per_block
        starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(slots)), np.bool_), np.diff(of_slots) > 0]))
        return order, of_slots[starts], np.append(starts, len(slots))

    def _load(self, blocks: Int64Array) -> None:
        """Fill the first rows of the buffer with these blocks, holes with zeros."""
        there = (self._written[blocks >> 3] >> (blocks & 7).astype(np.uint8)) & 1 == 1
        buffer = self._buffer[: len(blocks)]
        count = int(there.sum())
        if count:
            self._traffic.operations += self._file.read(blocks[there], self._buffer[:count])
            self._traffic.bytes_read += count * buffer.shape[1]
            self._check(blocks[there], self._buffer[:count])
        if count < len(blocks):
            if count:
                buffer[there] = self._buffer[:count].copy()
            buffer[~there] = 0

    def _check(self, blocks: Int64Array, buffer: Bytes) -> None:
        wrong = np.flatnonzero(buffer.view(np.uint64)[:, 0] != self._checksums(buffer))
        if len(wrong):
            raise SlowMemoryError(
                f"{self._file.path}: {len(wrong)} of {len(blocks)} blocks are not what was written, the first of rows "
                f"from slot {int(blocks[wrong[0]]) * self._per_block}",
                remedy=_REMEDY,
            )

    def _checksums(self, buffer: Bytes) -> npt.NDArray[np.uint64]:
        """Multilinear hash of 64-bit words (Lemire, Kaser: Strongly universal string hashing is fast, 2014, section 3)
        with odd factors modulo 2^64, so that any one changed word changes it. Not zero: a block of zeros is a hole."""
        sums: npt.NDArray[np.uint64] = buffer.view(np.uint64)[:, 1:] @ self._factors
        return sums + np.uint64(_GOLDEN)

    def _payload(self, blocks: int) -> Bytes:
        """View of the rows of the first blocks of the buffer, uint8 [blocks, rows_per_block, row_bytes]."""
        end = _HEAD_BYTES + self._per_block * self._row_bytes
        return self._buffer[:blocks, _HEAD_BYTES:end].reshape(blocks, self._per_block, self._row_bytes)

    def _masks(self, blocks: int) -> npt.NDArray[np.uint64]:
        return self._buffer[:blocks].view(np.uint64)[:, 1]

    def _beside(self) -> Path:
        return self._file.path.with_name(self._file.path.name + ".blocks")

    def _header(self, epoch: int | None) -> bytes:
        fields = {
            "identity": self._identity, "rows": self._rows, "row_bytes": self._row_bytes, "epoch": epoch,
            "blocks_crc": zlib.crc32(self._written.tobytes()) if epoch is not None else None,
        }  # fmt: skip
        text = json.dumps(fields).encode()
        return _MAGIC + f"{len(text)} {zlib.crc32(text)}\n".encode() + text

    def _reopen(self, epoch: int) -> npt.NDArray[np.uint8]:
        path = self._file.path
        fields = _fields_of(path, self._file.read_header())
        mine = {"identity": self._identity, "rows": self._rows, "row_bytes": self._row_bytes}
        for name, value in mine.items():
            if fields[name] != value:
                raise SlowMemoryError(f"{path}: {name} is {fields[name]!r}, not {value!r}", remedy=_REMEDY)
        if fields["epoch"] is None:
            raise SlowMemoryError(f"{path}: was in use when its process ended", remedy=_REMEDY)
        if fields["epoch"] != epoch:
            raise SlowMemoryError(f"{path}: is of epoch {fields['epoch']}, not {epoch}", remedy=_REMEDY)
        try:
            written = np.fromfile(self._beside(), dtype=np.uint8)
        except OSError as error:
            raise SlowMemoryError(f"{self._beside()}: cannot be read: {error.strerror}", remedy=_REMEDY) from error
        if zlib.crc32(written.tobytes()) != fields["blocks_crc"]:
            raise SlowMemoryError(f"{self._beside()}: is not what was written", remedy=_REMEDY)
        return written


def _odd_factors(count: int) -> npt.NDArray[np.uint64]:
    """Return fixed odd numbers (splitmix64's first round)."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed ^ (mixed >> np.uint64(27))) | np.uint64(1)


def _is_left(header: bytes) -> bool:
    """True for the header of a file that was in use when its process ended."""
    try:
        return _fields_of(Path(), header)["epoch"] is None
    except SlowMemoryError:
        return False


def _fields_of(path: Path, header: bytes) -> dict[str, object]:
    """Return the fields of a header; SlowMemoryError if it is none, or damaged."""
    try:
        length, crc = header[len(_MAGIC) :].split(b"\n", 1)[0].split()
        start = header.index(b"\n", len(_MAGIC)) + 1
        text = header[start : start + int(length)]
        if header.startswith(_MAGIC) and zlib.crc32(text) == int(crc):
            fields: dict[str, object] = json.loads(text)
            return fields
    except ValueError:
        pass
    raise SlowMemoryError(f"{path}: is no file of slow rows, or its header is damaged", remedy=_REMEDY)
