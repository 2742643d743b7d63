"""Counts of tiered storage reach the daemon: counted on a rank, sent in a progress message, summed, shown."""

from __future__ import annotations

import pytest
import torch

import flexd
from flexd.api.training import SlowMemoryStatus, slow_memory_status
from flexd.control.protocol import messages as m
from flexd.control.protocol.report import StepReport
from flexd.embedding import connect
from flexd.embedding.connect import Connection
from flexd.operations.training_monitor import SlowMemoryMonitor

TABLES = [flexd.EmbeddingTable("item", 60, 4), flexd.EmbeddingTable("shop", 30, 4)]
FENCE = m.Fence("job", "a1", 2, 7, "token")


class Daemon:
    """Takes the reports of a rank off the wire."""

    report_waiting = False

    def __init__(self) -> None:
        self.monitor = SlowMemoryMonitor(len(TABLES))

    def report(self, report: StepReport) -> None:
        arrived = m.decode(m.encode(m.Progress(FENCE, 0, 0, report)))
        assert isinstance(arrived, m.Progress)
        assert arrived.report is not None
        self.monitor.add(arrived.report)

    def stop(self, timeout_seconds: float) -> None:
        pass


def trained(
    batches: list[dict[str, list[int]]], daemon: Daemon, fast_memory_bytes: int | None
) -> SlowMemoryStatus | None:
    collection = flexd.EmbeddingCollection(TABLES, optimizer=flexd.SGD(0.1), fast_memory_bytes=fast_memory_bytes)
    connection = Connection(collection, daemon)  # type: ignore[arg-type]
    for batch in batches:
        found = collection({
            name: flexd.Jagged(torch.tensor(rows), torch.tensor([len(rows)])) for name, rows in batch.items()
        })  # fmt: skip
        sum(rows.values.sum() for rows in found.values()).backward()  # type: ignore[union-attr]
        collection.optimizer.step()
    connection.close()
    return slow_memory_status(daemon.monitor.totals(), collection.keyspace.tables)


@pytest.fixture(autouse=True)
def _every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "SLOW_MEMORY_SECONDS", 0.0)


def test_the_daemon_sees_what_slow_memory_did() -> None:
    batches = [
        {"item": [1, 2, 3, 2], "shop": [7]},
        {"item": [1, 2], "shop": [7, 8]},
        {"item": [40, 41], "shop": [9]},  # takes the places of item 3 and shop 8, used once, and changed then
        {"item": [3], "shop": [7]},
    ]
    cache_slots = 6
    shown = trained(batches, Daemon(), fast_memory_bytes=cache_slots * (16 + 64))
    assert shown is not None
    assert {each.table: (each.used, each.missed) for each in shown.tables} == {"item": (8, 6), "shop": (5, 3)}
    assert (shown.used, shown.missed, shown.evicted, shown.written) == (13, 9, 3, 3)
    assert shown.bytes_read > 0
    assert shown.bytes_written > 0
    assert shown.wait_seconds > 0.0
    assert shown.wait_share is not None
    assert 0.0 < shown.wait_share < 1.0
    names = {sample.name: sample.value for family in shown.metrics() for sample in family.samples if not sample.labels}
    assert names["flexd_slow_memory_wait_ratio"] == shown.wait_share
    by_table = {
        sample.labels["table"]: sample.value for family in shown.metrics() for sample in family.samples
        if sample.name == "flexd_slow_memory_rows_missed_total"
    }  # fmt: skip
    assert by_table == {"item": 6, "shop": 3}
