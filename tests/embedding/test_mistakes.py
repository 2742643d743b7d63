"""Mistakes of a trainer are named on its ranks, and by the daemon."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from flexd.api.training import training_status
from flexd.cli.status_command import status_blocks
from flexd.control.daemon.coordinator import ControlOptions, Coordinator
from flexd.control.daemon.journal import PlacementJournal
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.operations.training_monitor import TrainingMonitor
from tests.cli.test_status_command import HEALTHY, text_of
from tests.support import mistake_jobs
from tests.support.collection_jobs import tables
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


def test_every_mistake_is_named_on_the_rank_and_in_the_status(ranks: Ranks, tmp_path: Path) -> None:
    specs = [TableSpec(t.name, t.rows, t.dim, t.dtype, "sgd") for t in tables()]
    monitor = TrainingMonitor()
    coordinator = Coordinator(
        ControlOptions("job", timeout_seconds=5.0), KeySpace(specs), PlacementJournal(tmp_path), on_report=monitor.add
    )
    coordinator.start()
    kinds = {"row_counts", "differing_seeds", "lone_save", "changed_ids"}
    try:
        said, other = ranks(2).run(mistake_jobs.make_mistakes, coordinator.port)
        deadline = time.monotonic() + 20
        while {each.kind for each in monitor.mistakes.totals()} != kinds and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        coordinator.stop(15)
    assert set(said) == kinds
    assert set(other) == kinds - {"lone_save"}, "rank 1 did not save"
    assert "62" in said["row_counts"]
    assert "ranks [1] gave other values than rank 0" in said["differing_seeds"]
    assert "state_dict() was called on rank 0 and not on ranks [1]" in said["lone_save"]
    assert "changed or moved" in said["changed_ids"]
    status = training_status(monitor.totals(), monitor.ranks(), monitor.phases(), monitor.mistakes.totals())
    assert {each.kind: each.text for each in status.mistakes} == said
    shown = " ".join(text_of(status_blocks(HEALTHY.model_copy(update={"training": status}))).split())
    for kind, text in said.items():
        assert kind in shown
        assert text[:40] in shown
    families = {family.name: family for family in status.metrics()}
    counted = {sample.labels["kind"]: sample.value for sample in families["flexd_training_mistakes"].samples}
    assert counted["numpy"] == 0
    assert all(counted[kind] > 0 for kind in kinds)
