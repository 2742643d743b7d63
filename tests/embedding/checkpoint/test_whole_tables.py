"""Whole tables from the home rows of all ranks, window by window."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from flexd.embedding.checkpoint import whole_tables
from flexd.embedding.checkpoint.blocks import TableHomes


@pytest.mark.parametrize(("rows", "first_key", "world_size"), [(23, 7, 4), (3, 5, 4), (24, 0, 3), (9, 2, 1)])
@pytest.mark.parametrize("window_bytes", [1, 64, 2**20])
def test_windows_of_any_size_give_the_table(rows: int, first_key: int, world_size: int, window_bytes: int) -> None:
    table = torch.arange(2.0 * rows).view(rows, 2)
    ranks = [_Rank(table, first_key, world_size, rank) for rank in range(world_size)]
    with mock.patch.object(whole_tables, "MAX_WINDOW_BYTES", window_bytes):
        for rank in ranks:
            rank.everyone = ranks
            assert torch.equal(whole_tables.gather_rows(rank, rank.homes, rank.held), table)  # type: ignore[arg-type]
            assert sum(rank.gathered) < rows + world_size


class _Rank:
    """One rank's part of a table, and its collectives: the windows of the others are read where they are."""

    def __init__(self, table: torch.Tensor, first_key: int, world_size: int, rank: int) -> None:
        self.size = world_size
        # The dim-group begins at key 0.
        self.homes = TableHomes(len(table), first_key, rank, world_size, rank)
        self.held = torch.full(((first_key + len(table)) // world_size + 1, 2), -1.0)
        mine = self.homes.homed(rank, range(len(table)))
        self.held[self.homes.slots(mine)] = table[mine.start :: world_size]
        self.everyone: list[_Rank] = []
        self.gathered: list[int] = []
        self._first = 0

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        first, end = self._first, min(self._first + len(part) * self.size, self.homes.rows)
        self._first = end
        self.gathered.append(len(part) * self.size)
        parts = torch.zeros((self.size, *part.shape))
        for rank, other in enumerate(self.everyone):
            mine = other.homes.homed(rank, range(first, end))
            parts[rank, : len(mine)] = other.held[other.homes.slots(mine)]
        return parts
