"""``flexd.connect``: arguments, step reports, counts of tiered storage, ranks under a real coordinator."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flexd
from flexd.api.training import ids_status, slow_memory_status
from flexd.control.agent.rank_connection import PendingReports
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.epoch_manager import ControlOptions
from flexd.control.daemon.journal import PlacementJournal
from flexd.control.daemon.migration import MigrationRecord, MigrationState
from flexd.control.daemon.pusher import ChunkLimits
from flexd.control.protocol import messages as m
from flexd.control.protocol.report import StepReport, TrainingTotals
from flexd.core.errors import ConfigError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.connect import Connection, _agreed_attempt
from flexd.embedding.exchange.collectives import Traffic, TrafficKind
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.row_optimizers import RowWiseAdagrad
from flexd.operations.training_monitor import TrainingMonitor
from tests.support.collection_jobs import ROWS, ids, pair, random_placement, some, tables, train_step
from tests.support.rank_pool import Ranks
from tests.support.until import until


def connected(rank: int, layout: RankLayout, port: int, digest: int, limit: int) -> dict[str, Any]:
    """Train with a real agent until all ranks have the placement of this digest, and for three more steps."""
    collection = EmbeddingCollection(
        tables(), optimizer=RowWiseAdagrad(lr=0.1), layout=layout, replica_slots=[61, 23, 3]
    )
    connection = flexd.connect(collection, f"127.0.0.1:{port}", job="job", timeout_seconds=5.0)
    alone = EmbeddingCollection(tables(), optimizer=RowWiseAdagrad(lr=0.1), layout=layout)
    versions, equal, step, left = [], True, 0, 3
    while step < limit and left:
        for each in (collection, alone):
            train_step(each, some(0, step, rank))
        equal &= collection.replicas_bit_equal()
        versions.append(collection.placement_version)
        step += 1
        left -= int(
            collection.engine.migrator.digest == digest
        )  # equal on all ranks: they apply chunks at the same step
    out = {
        "priced": collection.engine.inbox.priced_exchange,
        "steps": step, "versions": versions, "bit_equal": equal, "digest": collection.engine.migrator.digest,
        "state": connection.agent.state,
        "tables": [[each.gather_table(name).numpy() for name in ROWS] for each in (collection, alone)],
        "accesses": sum(collection.traffic.totals()[f"{tier}_accesses"] for tier in ("home", "node", "device")),
    }  # fmt: skip
    connection.close(5.0)
    return out


def attempts(rank: int, run_ids: list[str]) -> list[str]:
    """Return the default attempt of one launch for each torchrun run id ("": not launched by torchrun). Rank 1 has
    joined later: it has not restarted as often."""
    found = []
    groups = ChainGroups(RankLayout(1, 2), Traffic(), torch.device("cpu"))
    for run_id in run_ids:
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
        if run_id:
            os.environ.update(TORCHELASTIC_RUN_ID=run_id, TORCHELASTIC_RESTART_COUNT=str(1 - rank))
        found.append(_agreed_attempt(groups, torch.device("cpu")))
    return found


class _RecordingAgent:
    """Record reports in place of an agent."""

    report_waiting = False

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self._pending = PendingReports()

    def report(self, report: StepReport | None = None, totals: TrainingTotals | None = None) -> None:
        self._pending.add(report, totals)
        if (sent := self._pending.drain()) is not None:
            self.reports.append(sent)

    def stop(self, timeout_seconds: float) -> None:
        pass


def test_reports_of_the_steps_add_up_to_the_totals() -> None:
    collection, _ = pair()
    with torch.no_grad():
        collection(ids(1, 2, 3))
    before = collection.traffic.totals()
    agent = _RecordingAgent()
    connection = Connection(collection, agent)  # type: ignore[arg-type]
    for step in range(4):
        collection(ids(*range(step + 1)))["item"].values.sum().backward()
        collection.traffic.sent(step, 10 * step, TrafficKind.SYNC)
        collection.optimizer.step()
    connection.close()
    collection(ids(1))["item"].values.sum().backward()
    collection.optimizer.step()
    assert [report.step for report in agent.reports] == [1, 2, 3, 4]
    assert [report.accesses_by_tier for report in agent.reports] == [(1, 0, 0), (2, 0, 0), (3, 0, 0), (4, 0, 0)]
    assert [(report.sent.sync_intra_bytes, report.sent.sync_inter_bytes) for report in agent.reports] == [
        (step, 10 * step) for step in range(4)
    ]
    assert before["home_accesses"] == 3


def test_missing_arguments_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    collection, _ = pair()
    monkeypatch.delenv("FLEXD_CONTROL", raising=False)
    with pytest.raises(ConfigError, match="FLEXD_CONTROL"):
        flexd.connect(collection, job="job")
    empty = tmp_path / "secret"
    empty.write_text("\n")
    for path, cause in ((empty, "empty"), (tmp_path / "none", "secret")):
        with pytest.raises(ConfigError, match=cause):
            flexd.connect(collection, "127.0.0.1:1", job="job", secret_file=path)


def test_all_ranks_of_a_launch_agree_on_its_attempt(ranks: Ranks) -> None:
    """Launched with plain env:// variables, and with torchrun's beside them."""
    first, second = ranks(2).run(attempts, ["", "job-7", "job-7", "é" * 90])
    assert first == second
    assert len(set(first)) == 4, "each has its random number"
    assert [name.rsplit("-", 1)[0] for name in first[1:3]] == ["job-7-1", "job-7-1"]


def test_ranks_under_a_real_coordinator(ranks: Ranks, tmp_path: Path) -> None:
    """Run two migrations, the second over the first: the final tables equal those without migrations."""
    specs = [TableSpec(t.name, t.rows, t.dim, t.dtype, "rowwise_adagrad") for t in tables()]
    journal = PlacementJournal(tmp_path)
    coordinator = Coordinator(
        ControlOptions("job", timeout_seconds=5.0, chunks=ChunkLimits(rows=7)), KeySpace(specs), journal
    )
    coordinator.priced_exchange = "direct"
    coordinator.start()
    layout = RankLayout(2, 2)
    final = random_placement(12, moves_on=layout)
    states: list[MigrationState] = []

    def push() -> None:
        for number, planned in enumerate((random_placement(11, moves_on=layout), final)):
            states.append(coordinator.migrate(MigrationRecord(migration_id=f"plan-{number}"), planned).wait(60))

    pusher = threading.Thread(target=push, daemon=True)
    pusher.start()
    try:
        results = ranks(4).run(connected, layout, coordinator.port, final.digest(), 20_000)
        pusher.join(30)
        assert states == [MigrationState.COMMITTED] * 2
        assert coordinator.placement().digest() == final.digest()
    finally:
        coordinator.stop(15)
        journal.close()
    steps = results[0]["steps"]
    counted = 0
    for result in results:
        assert result["priced"] == "direct"
        assert result["digest"] == final.digest(), result["state"]
        assert result["versions"] == results[0]["versions"]
        assert result["versions"][-1] >= 14, "two migrations of at least seven chunks each"
        assert result["bit_equal"]
        for table, unmoved in zip(*result["tables"], strict=True):
            np.testing.assert_allclose(table, unmoved, rtol=0, atol=1e-9)
        counted += result["accesses"]
    assert counted == sum(len(j.values) for s in range(steps) for r in range(4) for j in some(0, s, r).values())


def _heard(agent: _RecordingAgent, tables: int) -> TrainingMonitor:
    """Return a daemon's monitor to which all reports came in progress messages."""
    monitor, fence = TrainingMonitor(tables), m.Fence("job", "a1", 2, 7, "token")
    for report in agent.reports:
        message = m.decode(m.encode(m.Progress(fence, 0, 0, report)))
        assert isinstance(message, m.Progress)
        monitor.add(0, message.report)
    return monitor


def test_the_daemon_sees_what_slow_memory_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted on a rank, sent in a progress message, summed, shown."""
    monkeypatch.setattr("flexd.embedding.connect.SLOW_MEMORY_SECONDS", 0.0)
    specs = [flexd.EmbeddingTable("item", 60, 4), flexd.EmbeddingTable("shop", 30, 4)]
    collection = flexd.EmbeddingCollection(specs, optimizer=flexd.SGD(0.1), fast_memory_bytes=6 * (16 + 64))
    agent = _RecordingAgent()
    connection = Connection(collection, agent)  # type: ignore[arg-type]
    for item, shop in (
        ([1, 2, 3, 2], [7]),
        ([1, 2], [7, 8]),
        ([40, 41], [9]),  # takes the places of item 3 and shop 8, used once, and changed then
        ([3], [7]),
    ):
        found = collection({"item": torch.tensor(item), "shop": torch.tensor(shop)})
        sum(rows.values.sum() for rows in found.values()).backward()  # type: ignore[union-attr]
        collection.optimizer.step()
    connection.close()
    shown = slow_memory_status(_heard(agent, len(specs)).slow_memory(), collection.keyspace.tables)
    assert {each.table: (each.used, each.missed) for each in shown.tables} == {"item": (8, 6), "shop": (5, 3)}
    assert (shown.used, shown.missed, shown.evicted, shown.written) == (13, 9, 3, 3)
    assert min(shown.bytes_read, shown.bytes_written, shown.wait_seconds) > 0
    assert 0.0 < shown.wait_share < 1.0
    names = {sample.name: sample.value for family in shown.metrics() for sample in family.samples if not sample.labels}
    assert names["flexd_slow_memory_wait_ratio"] == shown.wait_share
    by_table = {
        sample.labels["table"]: sample.value for family in shown.metrics() for sample in family.samples
        if sample.name == "flexd_slow_memory_rows_missed_total"
    }  # fmt: skip
    assert by_table == {"item": 6, "shop": 3}


def test_the_daemon_hears_at_once_which_tables_are_read_only_now(tmp_path: Path) -> None:
    specs = [TableSpec(t.name, t.rows, t.dim, t.dtype, "rowwise_adagrad") for t in tables()]
    journal = PlacementJournal(tmp_path)
    coordinator = Coordinator(ControlOptions("job", timeout_seconds=5.0), KeySpace(specs), journal)
    coordinator.start()
    collection = EmbeddingCollection(tables(), optimizer=RowWiseAdagrad(lr=0.1))
    connection = flexd.connect(collection, f"127.0.0.1:{coordinator.port}", job="job", timeout_seconds=5.0)

    def known() -> str | None:
        live = coordinator.live()
        return None if live is None or live.trainer is None else live.trainer.read_only

    try:
        until(lambda: known() == "")
        collection.freeze(specs[1].name)
        until(lambda: known() == "-r-", what=known)
        collection.unfreeze(specs[1].name)
        until(lambda: known() == "", what=known)
    finally:
        connection.close(5.0)
        coordinator.stop(15)
        journal.close()


def test_the_daemon_sees_the_use_of_unbounded_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted at the homes, sent in a progress message, summed, shown."""
    monkeypatch.setattr("flexd.embedding.connect.IDS_SECONDS", 0.0)
    specs = [flexd.EmbeddingTable("item", 60, 4), flexd.EmbeddingTable("user", 30, 4, ids="unbounded")]
    collection = flexd.EmbeddingCollection(specs, optimizer=flexd.SGD(0.1))
    agent = _RecordingAgent()
    connection = Connection(collection, agent)  # type: ignore[arg-type]

    def train(*ids: int) -> None:
        collection({"item": torch.tensor([1]), "user": torch.tensor(ids)})["user"].values.sum().backward()
        collection.optimizer.step()

    train(7, -8, 7)
    train(7, 2**60)
    collection.reset_parameters()  # no row is an id's
    train(7)
    connection.close()
    shown = ids_status(_heard(agent, len(specs)).ids(), {}, collection.keyspace.tables)
    (of_users,) = shown.tables
    assert (of_users.table, of_users.rows, of_users.rows_used) == ("user", 30, 1)
    assert (of_users.look_ups, of_users.own, of_users.admitted, of_users.evicted) == (6, 1, 4, 0)
    by_table = {sample.name: sample.value for family in shown.metrics() for sample in family.samples}
    assert by_table["flexd_ids_look_ups_total"] == 6
    assert by_table["flexd_ids_rows_used"] == 1
