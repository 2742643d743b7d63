"""Whole tables from the home rows of all ranks, window by window."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from flexd.core.homes import Homes
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.embedding.checkpoint import whole_tables
from flexd.embedding.checkpoint.blocks import TableHomes


@pytest.mark.parametrize(("rows", "first_key", "world_size"), [(23, 7, 4), (3, 5, 4), (24, 1, 3), (9, 2, 1)])
@pytest.mark.parametrize("window_bytes", [1, 64, 2**20])
@pytest.mark.parametrize("rule", ["all", "node:0", "rank:0"])
def test_windows_of_any_size_give_the_table(
    rows: int, first_key: int, world_size: int, window_bytes: int, rule: str
) -> None:
    table = torch.arange(2.0 * rows).view(rows, 2)
    tables = [TableSpec("before", first_key, 2), TableSpec("table", rows, 2, homes=rule)]
    nodes = 2 if world_size == 4 else 1
    homes = Homes(KeySpace(tables), RankLayout(nodes, world_size // nodes))
    ranks = [_Rank(table, homes, rank) for rank in range(world_size)]
    with mock.patch.object(whole_tables, "MAX_WINDOW_BYTES", window_bytes):
        for rank in ranks:
            rank.everyone = ranks
            assert torch.equal(whole_tables.gather_rows(rank, rank.homes, rank.held), table)  # type: ignore[arg-type]
            sharing = rank.homes.sharing
            assert sum(rank.gathered) * sharing < (rows + sharing) * world_size


class _Rank:
    """One rank's part of a table, and its collectives: the windows of the others are read where they are."""

    def __init__(self, table: torch.Tensor, homes: Homes, rank: int) -> None:
        self.size = homes.layout.world_size
        self.homes = TableHomes(homes, 1, rank)
        self.held = torch.full((int(homes.home_rows(0)[rank]), 2), -1.0)
        self.homes.write_table(self.held, 0, table)
        self.everyone: list[_Rank] = []
        self.gathered: list[int] = []
        self._first = 0

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        first, end = self._first, min(self._first + len(part) * self.homes.sharing, self.homes.rows)
        self._first = end
        self.gathered.append(len(part) * self.size)
        parts = torch.zeros((self.size, *part.shape))
        for rank, other in enumerate(self.everyone):
            mine = other.homes.read(other.held, range(first, end))
            parts[rank, : len(mine)] = mine
        return parts
