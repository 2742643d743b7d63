"""Values of a table in a file of another program, npy or safetensors, of which each rank reads a part.

A file is read by offsets, so that no rank maps or holds more than a window of it, and never pickled objects. Each rank
reads for its own rows: those dealt out in turn lie between others', which it skips in memory, faster than sending them.
"""

from __future__ import annotations

import ast
import json
import math
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexd.core.errors import CheckpointError
from flexd.core.keyspace import QUANTIZED, SCALE_BYTES, TableSpec, row_width
from flexd.embedding.store.quantized_rows import scales_of
from flexd.embedding.store.store import TORCH_DTYPES

_NPY = b"\x93NUMPY"
_MAX_HEADER_BYTES = 2**26
_OF_NPY = {"<f8": torch.float64, "<f4": torch.float32, "<f2": torch.float16, "|i1": torch.int8}
_OF_SAFETENSORS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8,
}  # fmt: skip


class StoredMatrix(ABC):
    """A matrix that is stored row by row.

    Attributes:
        path: of the file or directory.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.shape[1] * self.dtype.itemsize

    def differences(self, spec: TableSpec) -> list[str]:
        """Return in words why the matrix does not fit a table."""
        dtype = TORCH_DTYPES[spec.dtype]
        fits = self.shape == (spec.rows, row_width(spec.dtype, spec.dim)) and self.dtype == dtype
        if fits or (spec.dtype == QUANTIZED and self.shape == (spec.rows, spec.dim) and self.dtype.is_floating_point):
            return []
        found = f"{' x '.join(map(str, self.shape))} {str(self.dtype).removeprefix('torch.')}"
        also = f": int8 {spec.dim + SCALE_BYTES} wide, with scales, or floats" if spec.dtype == QUANTIZED else ""
        return [f"{self.path} has {found}, the table {spec.rows} x {spec.dim} {spec.dtype}{also}"]

    def not_finite(self, rows: range, window_bytes: int) -> list[str]:
        """Return in words which of some rows has the first number that is not finite.

        Args:
            rows: every so many of consecutive ones.
        """
        return next((found for window in self.windows(rows, window_bytes) if (found := self.fault_of(*window))), [])

    def fault_of(self, rows: range, part: torch.Tensor) -> list[str]:
        """Return in words which of the rows of a window has the first number that is not finite."""
        numbers = scales_of(part) if part.dtype == torch.int8 else part
        # Ten times as fast as to look at each number: a sum is finite only if all numbers are.
        if numbers.sum(dtype=torch.float64 if numbers.dtype == torch.float64 else torch.float32).isfinite():
            return []
        if not (bad := numbers.isfinite().all(dim=1).logical_not_()).any():
            return []
        return [f"{self.path}: row {rows[int(bad.nonzero()[0])]} has a number that is not finite"]

    @abstractmethod
    def windows(self, rows: range, window_bytes: int) -> Iterator[tuple[range, torch.Tensor]]:
        """Yield some rows in parts of which at most ``window_bytes`` of the file are read, at least a row: (range of n
        rows, [n, dim], whose memory the next part uses again).

        Args:
            rows: every so many of consecutive ones; those between are read too.

        Raises:
            CheckpointError: the file cannot be read any more.
        """


@dataclass(frozen=True)
class TableFile(StoredMatrix):
    """A matrix in a file.

    Attributes:
        first_byte: of the first row.
    """

    path: Path
    first_byte: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(path: str | os.PathLike[str], tensor: str = "") -> TableFile:
        """Read the header of a file.

        Args:
            tensor: name of the matrix in a safetensors file; may be left out if it has one.

        Raises:
            CheckpointError: the file cannot be read, is of another format, is cut, or has no such matrix.
        """
        path = Path(path)
        try:
            with path.open("rb") as file:
                head = file.read(12)
                made = _npy(path, file, head) if head.startswith(_NPY) else _safetensors(path, file, head, tensor)
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}", remedy="give a file that every rank can read") from error
        except (ValueError, LookupError, TypeError, AttributeError, SyntaxError, struct.error, RecursionError) as error:
            raise CheckpointError(
                f"{path} is neither a npy nor a safetensors file: {error}", remedy="save it by np.save or safetensors"
            ) from error
        if size < made.first_byte + math.prod(made.shape) * made.dtype.itemsize:
            raise CheckpointError(f"{path} is cut: it has {size} bytes", remedy="copy it again")
        return made

    def windows(self, rows: range, window_bytes: int) -> Iterator[tuple[range, torch.Tensor]]:
        # Of two buffers one is read into while the other is used: the disk and a processor work at the same time. Both
        # are small enough for a processor's cache.
        each = max(1, window_bytes // (8 * self.row_bytes * rows.step))
        windows = [rows[first : first + each] for first in range(0, len(rows), each)]
        size = min(each, len(rows)) * rows.step * self.row_bytes
        buffers = [torch.empty(size, dtype=torch.uint8) for _ in windows[:2]]
        try:
            with self.path.open("rb", buffering=0) as file, ThreadPoolExecutor(1) as reader:

                def read(number: int) -> torch.Tensor:
                    some, buffer = windows[number], buffers[number % 2]
                    wanted = (some[-1] - some[0] + 1) * self.row_bytes
                    file.seek(self.first_byte + some[0] * self.row_bytes)
                    _fill(file, buffer.numpy().data[:wanted])
                    return buffer[:wanted].view(self.dtype).view(-1, self.shape[1])[:: rows.step]

                ahead = [reader.submit(read, 0)] if windows else []
                for number, some in enumerate(windows):
                    part = ahead.pop().result()
                    if number + 1 < len(windows):
                        ahead.append(reader.submit(read, number + 1))
                    yield some, part
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error}", remedy="keep it until it is loaded") from error


def _fill(file: Any, buffer: memoryview) -> None:
    while len(buffer):
        got = file.readinto(buffer)
        if not got:
            raise OSError("was cut while it was read")
        buffer = buffer[got:]


def _npy(path: Path, file: Any, head: bytes) -> TableFile:
    wide = head[6] > 1
    (length,) = struct.unpack("<I" if wide else "<H", head[8 : 12 if wide else 10])
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    first_byte = (12 if wide else 10) + length
    file.seek(first_byte - length)
    fields = ast.literal_eval(file.read(length).decode("latin1"))
    shape = tuple(int(size) for size in fields["shape"])
    if fields["fortran_order"] or len(shape) != 2 or fields["descr"] not in _OF_NPY:
        order = " in Fortran order" if fields["fortran_order"] else ""
        raise ValueError(f"an array of shape {shape}{order}, dtype {str(fields['descr'])[:40]}")
    return TableFile(path, first_byte, shape, _OF_NPY[fields["descr"]])


def _safetensors(path: Path, file: Any, head: bytes, tensor: str) -> TableFile:
    (length,) = struct.unpack("<Q", head[:8])
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    file.seek(8)
    entries = {name: entry for name, entry in json.loads(file.read(length)).items() if name != "__metadata__"}
    if not tensor and len(entries) == 1:
        (tensor,) = entries
    if tensor not in entries:
        raise CheckpointError(
            f"{path} has no tensor {tensor!r}", remedy=f"tensor= one of {', '.join(sorted(entries)[:8])}"
        )
    entry = entries[tensor]
    shape = tuple(int(size) for size in entry["shape"])
    if len(shape) != 2 or entry["dtype"] not in _OF_SAFETENSORS:
        raise ValueError(f"tensor {tensor!r} of shape {shape}, dtype {str(entry['dtype'])[:40]}")
    return TableFile(path, 8 + length + int(entry["data_offsets"][0]), shape, _OF_SAFETENSORS[entry["dtype"]])
