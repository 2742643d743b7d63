"""Mistakes of a trainer are named on its ranks, and by the daemon."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import flexd
from flexd.api.training import training_status
from flexd.cli.render import blocks_of, show
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.epoch_manager import ControlOptions
from flexd.control.daemon.journal import PlacementJournal
from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.core.usage_warnings import USAGE_WARNINGS
from flexd.embedding.features import Jagged
from flexd.operations.training_monitor import TrainingMonitor
from tests.support.collection_jobs import tables
from tests.support.rank_pool import Ranks
from tests.support.statuses import HEALTHY


def batch(shift: int) -> dict[str, Jagged]:
    return {"item": Jagged((torch.arange(4) + shift) % 61, torch.tensor([4]))}


def make_mistakes(rank: int, port: int) -> dict[str, str]:
    """Make one mistake of each kind but that of an installation; return what this rank says of them by kind."""
    USAGE_WARNINGS._noted.clear()  # of other jobs of the process
    collection = flexd.EmbeddingCollection(tables(), layout=RankLayout(2, 1))
    with pytest.raises(EmbeddingError):  # a checkpoint of a model with other row counts, loaded before the connection
        collection.load_rows("item", 0, torch.zeros(62, collection.tables[0].dim, dtype=torch.float64))
    connection = flexd.connect(collection, f"127.0.0.1:{port}", job="job", timeout_seconds=5.0)
    deadline = time.monotonic() + 30  # a report waits for the daemon to know all ranks
    while not connection.agent.counters.get("reports") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert connection.agent.counters.get("reports"), "what was noted before is reported without a step"
    generator = torch.Generator().manual_seed(rank)
    with pytest.raises(EmbeddingError):  # values made from another seed on each rank
        collection.load_rows("item", 0, torch.rand(61, collection.tables[0].dim, generator=generator).double())
    if rank == 0:  # a framework that saves on rank 0
        collection.state_dict()
    for features in flexd.prefetch([batch(shift) for shift in range(4)], collection):
        masked = {name: Jagged(jagged.values.flip(0), jagged.lengths) for name, jagged in features.items()}
        collection(masked)["item"].values.sum().backward()
        collection.optimizer.step()
    while connection.agent.report_waiting and time.monotonic() < deadline + 30:
        time.sleep(0.02)
    dist.barrier()  # a rank that leaves ends the epoch in which the others report
    connection.close(5.0)
    collection.close()
    return {report.kind: report.text for report in USAGE_WARNINGS.reports()}


def test_every_mistake_is_named_on_the_rank_and_in_the_status(ranks: Ranks, tmp_path: Path) -> None:
    specs = [TableSpec(t.name, t.rows, t.dim, t.dtype, "sgd") for t in tables()]
    monitor = TrainingMonitor()
    coordinator = Coordinator(
        ControlOptions("job", timeout_seconds=5.0), KeySpace(specs), PlacementJournal(tmp_path), on_report=monitor.add
    )
    coordinator.start()
    kinds = {"row_counts", "differing_seeds", "partial_state_dict", "changed_ids"}
    try:
        said, other = ranks(2).run(make_mistakes, coordinator.port)
        deadline = time.monotonic() + 20
        while {each.kind for each in monitor.usage_warnings()} != kinds and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        coordinator.stop(15)
    assert set(said) == kinds
    assert set(other) == kinds - {"partial_state_dict"}, "rank 1 did not save"
    for kind, words in {
        "row_counts": "62",
        "differing_seeds": "ranks [1] gave other values than rank 0",
        "partial_state_dict": "state_dict() was called on rank 0 and not on ranks [1]",
        "changed_ids": "changed or moved",
    }.items():
        assert words in said[kind]
    status = training_status(monitor.totals(), monitor.ranks(), monitor.phases(), monitor.usage_warnings())
    assert {each.kind: each.text for each in status.usage_warnings} == said
    screen = io.StringIO()
    show(blocks_of(HEALTHY.model_copy(update={"training": status})), screen)
    shown = " ".join(screen.getvalue().split())
    for kind, text in said.items():
        assert kind in shown
        assert text[:40] in shown
    families = {family.name: family for family in status.metrics()}
    counted = {sample.labels["kind"]: sample.value for sample in families["flexd_training_usage_warnings"].samples}
    assert counted["numpy"] == 0
    assert all(counted[kind] > 0 for kind in kinds)
