"""Tables, rows and ranks of a daemon that is not there."""

from __future__ import annotations

from collections.abc import Callable

from flexd.api.daemon import ConfigReport
from flexd.api.rank import RankPage, RankReport
from flexd.api.table import HotRow, HotRowPage, TableOrder, TablePage, TableReport
from flexd.api.training import Timeline, TrafficSample
from flexd.control.daemon.migration_record import MigrationRecord
from flexd.control.daemon.migration_states import MigrationState

STRANGE = '<img src=x onerror="boom()">'
"""A table may be called anything."""


class FakeInspection:
    """Calls ``entered`` with its name and arguments first, which may raise."""

    def __init__(self, entered: Callable[..., None]) -> None:
        self._entered = entered

    def config(self) -> ConfigReport:
        self._entered("config")
        return ConfigReport(version="1.2.3", config={"job": "job", "tables": [{"name": "items", "rows": 100}]})

    def tables(self, offset: int, limit: int, order: TableOrder) -> TablePage:
        self._entered("tables", offset, limit, order)
        items = TableReport(
            table="items", rows=1000, dim=64, dtype="float32", optimizer="rowwise_adagrad", group=0, accesses=900_000,
            share=0.9, placed_rows={"HOME": 980, "NODE": 15, "DEVICE": 5}, counter="dense", counter_bytes=4000,
            distinct_rows=740.0, coverage=1.0, drift_ratio=1.08,
        )  # fmt: skip
        other = TableReport(
            table=STRANGE, rows=5_000_000, dim=16, dtype="float16", optimizer="sgd", group=1, accesses=100_000,
            share=0.1, placed_rows={"HOME": 5_000_000, "NODE": 0, "DEVICE": 0}, counter="count_min",
            counter_bytes=1_048_576,
        )  # fmt: skip
        return TablePage(total=2, offset=offset, tables=(items, other)[offset : offset + limit])

    def rows(self, table: str, offset: int, limit: int) -> HotRowPage:
        self._entered("rows", table, offset, limit)
        tiers = ("DEVICE", "NODE", "HOME")
        hottest = tuple(
            HotRow(place=i + 1, row=10 * i, key=10 * i, share=0.2 / (i + 1), share_lower=0.19 / (i + 1),
                   share_upper=0.21 / (i + 1), tier=tiers[min(i, 2)], home_rank=10 * i % 4)
            for i in range(12)
        )  # fmt: skip
        return HotRowPage(
            table=table, rows=1000, total=12, offset=offset, weight=900_000.0,
            placed_rows={"HOME": 998, "NODE": 1, "DEVICE": 1}, hottest=hottest[offset : offset + limit],
        )  # fmt: skip

    def ranks(self, offset: int, limit: int) -> RankPage:
        self._entered("ranks", offset, limit)
        ranks = [
            RankReport(
                rank=rank, node=rank // 2, local_rank=rank % 2, placement_version=7, behind=0, step=120 + rank,
                report_age_seconds=0.5, step_seconds=0.025, accesses_per_step=4096.0, replica_share=0.75,
                intra_node_bytes_per_step=2e6, inter_node_bytes_per_step=1e6 * (rank + 1),
            )
            for rank in range(3)
        ]  # fmt: skip
        return RankPage(
            generation=2, attempt="a1", nodes=2, local_ranks=2, ready=False, problem="3 of 4 ranks are here",
            replica_slots=(512, 64), cluster="azure-a100-200g", placement_version=7, imbalance=1.5, total=4,
            offset=offset, ranks=(*ranks, RankReport(rank=3, node=1, local_rank=1))[offset : offset + limit],
        )  # fmt: skip

    def timeline(self) -> Timeline:
        self._entered("timeline")
        samples = tuple(
            TrafficSample(
                unix_seconds=1_700_000_000.0 + 5 * i, steps=20, accesses={"HOME": 3000 - 40 * i, "NODE": 20 * i,
                "DEVICE": 20 * i}, inter_node_bytes=4e5 - 6e3 * i,
                all_to_all_inter_node_bytes=4e5 - 8e3 * i, sync_inter_node_bytes=2e3 * i,
                intra_node_bytes=5e5, migration_bytes=1e3, row_wise_inter_node_bytes=1.5e6, step_seconds=0.02,
            )
            for i in range(40)
        )  # fmt: skip
        plan = MigrationRecord(
            migration_id="p1", plan_id="p1", reason=f"drift {STRANGE}", created_unix_seconds=1_700_000_100.0,
            state=MigrationState.COMMITTED,
            promotions=120, demotions=3, rows_applied=123,
        )  # fmt: skip
        return Timeline(interval_seconds=5.0, samples=samples, plans=(plan,))
