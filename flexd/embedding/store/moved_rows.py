"""The rows that live in another node than their home: where each of them is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from flexd.embedding.store.bucket_table import BucketTable

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

NOT_MOVED = 2**31 - 1
"""The place of a row that has not moved."""


class MovedRows:
    """Places of moved rows: the slot of one that lives here, -1 - its node of one that lives elsewhere.

    Every rank has the same rows: node owners look them up, and samples are dealt by where rows are. They are no entries
    of the ``Directory``: nothing of them is synchronised.

    Args:
        max_address: no address is above it.
        node: of this rank.
    """

    def __init__(self, max_address: int, node: int, device: torch.device) -> None:
        self._node = node
        self._table = BucketTable(0, max_address, device)
        self._nowhere = torch.full((), NOT_MOVED, dtype=torch.int32, device=device)
        self._device = device

    def __len__(self) -> int:
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Bytes held between steps."""
        return self._table.nbytes + self._nowhere.nbytes

    def find(self, addresses: torch.Tensor) -> torch.Tensor:
        """int64 [n] addresses -> int32 [n] places. The host waits for nothing."""
        return self._table.values_of(addresses, self._nowhere)

    def read(self, addresses: Int64Array) -> tuple[Int64Array, Int32Array]:
        """int64 [n] addresses -> (int64 [n] nodes in which moved rows live, -1 for rows that have not moved; int32 [n]
        slots of those that live on this rank, else -1)."""
        places = self.find(self._to_device(addresses)).cpu().numpy()
        here = (places >= 0) & (places != NOT_MOVED)
        nodes = np.where(places < 0, -1 - places.astype(np.int64), np.where(here, self._node, -1))
        return nodes, np.where(here, places, np.int32(-1)).astype(np.int32)

    def nodes_of(self, addresses: Int64Array, homes: Int64Array) -> Int64Array:
        """Return int64 [n], the nodes in which rows live, given those of their ``homes``."""
        if not len(self):
            return homes
        nodes, _ = self.read(addresses)
        return np.where(nodes >= 0, nodes, homes)

    def addresses(self) -> Int64Array:
        """Return int64 [n] addresses of all rows, ascending. Linear in the table."""
        found: Int64Array = self._table.items()[0].cpu().numpy()
        found.sort()
        return found

    def change(self, removed: Int64Array, addresses: Int64Array, slots: Int32Array, nodes: Int64Array) -> None:
        """Remove rows and add others.

        Args:
            removed: int64 [r] addresses, all of them here.
            addresses: int64 [m], not here unless removed.
            slots: int32 [m], of the rows that live on this rank; -1 for all others.
            nodes: int64 [m], where the others live.
        """
        if len(removed):
            self._table.remove(self._table.find(self._to_device(removed))[1])
        if len(addresses):
            places = np.where(slots >= 0, slots, -1 - nodes).astype(np.int32)
            self._table.insert(self._to_device(addresses), self._to_device(places))

    def _to_device(self, column: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(column)).to(self._device)
