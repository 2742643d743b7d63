"""Trainers that were moved to flexd in place, under a real coordinator: training equals that of the unchanged model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from flexd.control.daemon.coordinator import ControlOptions, Coordinator
from flexd.control.daemon.journal import PlacementJournal
from flexd.control.daemon.migration import MigrationState
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import Placement
from tests.support.any_trainer_jobs import PLAIN_TABLES, plain, tolerance
from tests.support.rank_pool import RankPool

POOLED = {"replaced": {"user", "shop", "tag"}, "embedded": set()}


@pytest.mark.parametrize("kind", ["replaced", "embedded"])
def test_rows_migrate_while_a_moved_trainer_trains(tmp_path: Path, ranks: Callable[[int], RankPool], kind: str) -> None:
    if kind == "replaced" and find_spec("torchrec") is None:
        pytest.skip("TorchRec is not here: make torchrec")
    keyspace = KeySpace([TableSpec(name, rows, dim, dtype, "sgd") for name, rows, dim, dtype in PLAIN_TABLES[kind]])
    journal = PlacementJournal(tmp_path)
    coordinator = Coordinator(ControlOptions("test", timeout_seconds=5.0), keyspace, journal)
    coordinator.start()
    rows = np.arange(0, sum(group.rows for group in keyspace.groups), 2)
    planned = Placement(rows, (rows % 2 + 1).astype(np.uint8))
    stop = tmp_path / "stop"
    states: list[MigrationState] = []

    def push() -> None:
        states.append(coordinator.migrate("plan", lambda live: live.delta_to(planned).chunks(7)).wait(60))
        stop.touch()

    pusher = threading.Thread(target=push, daemon=True)
    pusher.start()
    try:
        results = ranks(2).run("any_trainer_jobs:trained", kind, coordinator.port, stop, 0.0, 20_000, False)
        pusher.join(30)
        live = coordinator.live()
        assert states == [MigrationState.COMMITTED]
        assert live is not None
        assert live.trainer is not None, "the trainer says how it was constructed"
        assert (live.trainer.exchange, live.trainer.replica_sums) == ("chain", "all_reduce")
        assert set(live.trainer.answer_by_table(keyspace.tables)) == POOLED[kind]
    finally:
        coordinator.stop(15)
        journal.close()
    losses, tables = plain(kind, len(results[0]["losses"]))
    for rank, result in enumerate(results):
        assert result["equal"]
        assert result["listed"][-1] > 0, result["state"]
        assert result["losses"] == pytest.approx(losses[rank], abs=tolerance(kind))
        for name, table in tables.items():
            torch.testing.assert_close(result["tables"][name], table, rtol=tolerance(kind), atol=tolerance(kind))
