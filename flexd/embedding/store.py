"""The rows of one dim-group that one rank holds: its home rows, then its replica pool."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from flexd.embedding.directory import Directory, HomeOrder
from flexd.keyspace import DimGroup, state_columns
from flexd.layout import RankLayout

TORCH_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class GroupStore:
    """Allocated once: rows [home_rows + replica_slots, dim], state beside them; memory never grows afterwards.

    Home rows stand at ``(key - first_home_key) // world_size``; replica slot s stands at ``home_rows + s``.
    """

    def __init__(
        self, group: DimGroup, layout: RankLayout, rank: int, replica_slots: int, device: torch.device
    ) -> None:
        self.group = group
        self.world_size = layout.world_size
        self.rank = rank
        self.first_home_key = group.first_key + (rank - group.first_key) % layout.world_size
        self.home_rows = max(0, -(-(group.end_key - self.first_home_key) // layout.world_size))
        self.replica_slots = replica_slots
        self.dtype = TORCH_DTYPES[group.dtype]
        slots = self.home_rows + replica_slots
        state_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.rows = torch.zeros((slots, group.dim), dtype=self.dtype, device=device)
        floats = sum(state_columns(group.optimizer, group.dim).values())
        self.state = torch.zeros((slots, floats), dtype=state_dtype, device=device)
        self.directory = Directory.empty(
            HomeOrder(group.first_key, group.rows, layout, layout.local_rank_of(rank)), device
        )
        self._free = np.arange(slots - 1, self.home_rows - 1, -1, dtype=np.int32)
        self._free_count = replica_slots

    @property
    def free_slots(self) -> int:
        return self._free_count

    @property
    def row_bytes(self) -> int:
        """Bytes of one row with its state: what a migration copies."""
        return self.rows.shape[1] * self.rows.element_size() + self.state.shape[1] * self.state.element_size()

    def home_keys(self) -> npt.NDArray[np.int64]:
        """int64 [home_rows]: the keys homed here, in slot order."""
        return np.arange(self.home_rows, dtype=np.int64) * self.world_size + self.first_home_key

    def home_slots(self, keys: torch.Tensor) -> torch.Tensor:
        """int64 keys homed here -> int64 slots."""
        return (keys - self.first_home_key) // self.world_size

    def locate(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """int64 [n] keys of the group -> (bool [n] held here, int64 [n] slot, int64 [n] directory position or -1).

        Slot and position are meaningless where the row is not held.
        """
        home = keys % self.world_size == self.rank
        slots = self.home_slots(keys)
        at, found = self.directory.find(keys)
        if len(self.directory) == 0:
            return home, slots, at - 1
        slots = torch.where(found, self.directory.slots_at(at), slots)
        return home | found, slots, torch.where(found, at, -1)

    def take_slots(self, count: int) -> npt.NDArray[np.int32]:
        """int32 [count] free replica slots; the caller has checked that there are enough."""
        self._free_count -= count
        return self._free[self._free_count : self._free_count + count].copy()

    def give_slots(self, slots: npt.NDArray[np.int32]) -> None:
        self._free[self._free_count : self._free_count + len(slots)] = slots
        self._free_count += len(slots)

    def pack(self, slots: torch.Tensor) -> torch.Tensor:
        """uint8 [n, row_bytes]: rows and state, for copying to another rank."""
        rows = self.rows.index_select(0, slots).view(torch.uint8)
        if self.state.shape[1] == 0:
            return rows
        return torch.cat([rows, self.state.index_select(0, slots).view(torch.uint8)], dim=1)

    def unpack(self, packed: torch.Tensor, slots: torch.Tensor) -> None:
        """Inverse of ``pack`` into ``slots``."""
        width = self.rows.shape[1] * self.rows.element_size()
        self.rows.index_copy_(0, slots, _aligned(packed[:, :width]).view(self.rows.dtype))
        if self.state.shape[1]:
            self.state.index_copy_(0, slots, _aligned(packed[:, width:]).view(self.state.dtype))


def _aligned(columns: torch.Tensor) -> torch.Tensor:
    """A copy, always: ``contiguous()`` leaves one row as it is, at an offset that no wider number may start at."""
    return columns.clone(memory_format=torch.contiguous_format)
