"""Values of a table in a checkpoint of ``torch.distributed.checkpoint``, as TorchRec and flexd write them.

Each rank reads them alone, chunk by chunk. A chunk is what one rank has saved of the table.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from flexd.core.errors import CheckpointError
from flexd.embedding.checkpoint.table_file import StoredMatrix


class DcpTable(StoredMatrix):
    """A matrix in the directory of a checkpoint. The chunks of the rows that were read last stay in memory."""

    def __init__(self, path: Path, name: str, entry: TensorStorageMetadata, reader: FileSystemReader) -> None:
        self.path, self.shape, self.dtype = path, tuple(entry.size), entry.properties.dtype
        self._name, self._entry, self._reader = name, entry, reader
        # By the place of their first number.
        self._chunks: dict[tuple[int, ...], torch.Tensor] = {}

    @staticmethod
    def of(path: Path, tensor: str, table: str) -> DcpTable:
        """Read the metadata of a checkpoint, by torch, which unpickles them.

        Args:
            tensor: name of the matrix in the checkpoint; empty: the only weight of a module with the name of the table.
            table: its name.

        Raises:
            CheckpointError: they cannot be read, or there is no such matrix.
        """
        reader = FileSystemReader(os.fspath(path))
        try:
            metadata = reader.read_metadata()
            reader.set_up_storage_reader(metadata, is_coordinator=False)
        except Exception as error:  # unreadable bytes lead to errors of many types
            raise CheckpointError(
                f"{path} is no checkpoint of torch.distributed.checkpoint: {type(error).__name__}: {error}",
                remedy="give its directory, which every rank can read, or a file",
            ) from error
        matrices = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and len(entry.size) == 2
        }
        weights = [name for name in matrices if f".{name}".endswith(f".{table}.weight")]
        found = [name for name in matrices if name == tensor] if tensor else weights
        if len(found) != 1:
            what = f"matrix {tensor!r}" if tensor else f"weight of {table!r}"
            raise CheckpointError(
                f"{path} has {len(found) or 'no'} {what}",
                remedy=f"tensor= one of {', '.join(sorted(weights or matrices)[:8])}",
            )
        return DcpTable(path, found[0], matrices[found[0]], reader)

    def windows(self, rows: range, window_bytes: int) -> Iterator[tuple[range, torch.Tensor]]:
        each = max(1, window_bytes // (self.row_bytes * rows.step))
        for first in range(0, len(rows), each):
            some = rows[first : first + each]
            yield some, self._read(range(some[0], some[-1] + 1))[:: rows.step]

    def _read(self, rows: range) -> torch.Tensor:
        """Return consecutive rows, [n, dim]."""
        dim = self.shape[1]
        found = torch.empty((len(rows), dim), dtype=self.dtype)
        wanted = ChunkStorageMetadata(torch.Size((rows.start, 0)), torch.Size((len(rows), dim)))
        items = create_read_items_for_chunk_list(self._name, self._entry, [wanted])
        if sum(math.prod(item.lengths) for item in items) != found.numel():
            raise CheckpointError(f"{self.path} lacks rows of {self._name}", remedy="load another checkpoint")
        places = [tuple(item.storage_index.offset or ()) for item in items]
        self._chunks = {place: chunk for place, chunk in self._chunks.items() if place in places}
        for item, place in zip(items, places, strict=True):
            if place not in self._chunks:
                self._chunks[place] = self._read_chunk(place)
            (first, left), (start, column), (count, width) = item.dest_offsets, item.storage_offsets, item.lengths
            part = self._chunks[place][start : start + count, column : column + width]
            found[first : first + count, left : left + width] = part
        return found

    def _read_chunk(self, place: tuple[int, ...]) -> torch.Tensor:
        stored = next(chunk for chunk in self._entry.chunks if tuple(chunk.offsets) == place)
        items = create_read_items_for_chunk_list(self._name, self._entry, [stored])
        whole = [item for item in items if tuple(item.storage_index.offset or ()) == place]
        target = _Target(torch.empty(tuple(stored.sizes), dtype=self.dtype))
        try:
            self._reader.read_data(LoadPlan(whole), target).wait()  # type: ignore[arg-type]
        except Exception as error:  # as above
            raise CheckpointError(
                f"{self.path}: {self._name} cannot be read: {type(error).__name__}: {error}",
                remedy="copy the checkpoint again, and keep it until it is loaded",
            ) from error
        return target.tensor


class _Target:
    """The planner of one tensor, for ``FileSystemReader.read_data``: the place to which it is read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        del item
        return self.tensor

    def commit_tensor(self, item: ReadItem, tensor: Any) -> None:
        """Do nothing: the tensor is where it belongs."""
