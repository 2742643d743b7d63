"""What slow rows in a file of blocks have in common, whatever the order in which the blocks are filled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from flexd.core.errors import SlowMemoryError
from flexd.embedding.store.slow.block_file import BlockFile, BlockSums, Int64Array
from flexd.embedding.store.slow.slow_rows import FreshRows, SlowTraffic


@dataclass(frozen=True)
class BlockLayout:
    """How rows fill blocks.

    Attributes:
        rows_per_block: of a full one.
        block_bytes: a multiple of ``PAGE_BYTES``.
        blocks: of the file.
    """

    rows_per_block: int
    block_bytes: int
    blocks: int


class BlockRows(ABC):
    """Rows of a ``SlowRows`` in the checksummed blocks of a file.

    The file holds nothing of worth beyond its process: a run begins with a new one (``BlockFile``), and its rows come
    from a checkpoint.

    Args:
        rows: number of slots.
        row_bytes: of a packed row.
        fresh: makes rows that were never written.
        threads: calls in flight.
        deadline_seconds: of a batch of blocks.

    Raises:
        SlowMemoryError: as ``BlockFile``.
    """

    def __init__(
        self,
        path: Path,
        rows: int,
        row_bytes: int,
        fresh: FreshRows,
        *,
        threads: int = 32,
        deadline_seconds: float = 60.0,
    ) -> None:
        layout = self.layout(rows, row_bytes)
        self._rows, self._row_bytes, self._fresh = rows, row_bytes, fresh
        self._per_block, self._blocks = layout.rows_per_block, layout.blocks
        self._deadline_seconds = deadline_seconds
        self._file = BlockFile(
            path, layout.blocks, layout.block_bytes, threads=threads, deadline_seconds=deadline_seconds
        )
        self._sums = BlockSums(layout.block_bytes)
        self._traffic = SlowTraffic()
        self._allocate()

    @abstractmethod
    def _allocate(self) -> None:
        """Make what is in memory beside the file, which is open."""

    @staticmethod
    @abstractmethod
    def layout(rows: int, row_bytes: int) -> BlockLayout:
        """Return how so many rows of so many bytes fill blocks."""

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def row_bytes(self) -> int:
        return self._row_bytes

    @property
    def traffic(self) -> SlowTraffic:
        return self._traffic

    def _check_slots(self, slots: Int64Array) -> None:
        if len(slots) and not 0 <= slots.min() <= slots.max() < self._rows:
            raise SlowMemoryError(f"{self._file.path}: slots beyond its {self._rows} rows", remedy="report this")
