"""Clipping by norm and torch's GradScaler over sharded rows, compared with one process."""

import logging

import numpy as np
import pytest
import torch

import flexd
from flexd.core.placement import Delta, RankLayout
from flexd.core.usage_warnings import UsageWarningLog
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.features import Jagged
from flexd.embedding.row_optimizers import SGD
from flexd.embedding.step import RowGate
from tests.support.collection_jobs import ids
from tests.support.rank_pool import Ranks


def overflow_in_the_sum(rank: int, layout: RankLayout) -> tuple[list[float], int, bool]:
    """Train on gradients that are finite on each rank and overflow in the sum; then on finite ones."""
    collection = EmbeddingCollection(
        [EmbeddingTable("item", 9, 2, dtype="float16")], optimizer=SGD(1e-3), layout=layout, average_gradients=False
    )
    before = collection.gather_table("item")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scales = []
    for size in (10_000.0, 5.0):
        out = collection({"item": Jagged(torch.tensor([4]), torch.tensor([1]))})["item"].values
        scaler.scale(out.float().sum() * size).backward()
        scaler.step(collection.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    moved = (before - collection.gather_table("item")).float()
    right = bool((moved[4] - 1e-3 * 5.0 * layout.world_size).abs().max() < 1e-3) and not moved[[0, 1, 2, 3, 5]].any()
    return scales, collection.steps, right


def test_an_overflow_of_the_sum_is_seen_by_every_rank(ranks: Ranks) -> None:
    for result in ranks(4).run(overflow_in_the_sum, RankLayout(2, 2)):
        assert result == ([2.0, 2.0], 1, True)


def make(dtype: str = "float64", lr: float = 0.5) -> flexd.EmbeddingCollection:
    return flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 20, 4, dtype=dtype)], optimizer=flexd.SGD(lr))


def backward(collection: flexd.EmbeddingCollection, *rows: int, times: float = 1.0) -> None:
    (collection(ids(*rows))["item"].values.sum() * times).backward()


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_rows_by_torch_is_warned_of_once(
    foreach: bool | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = UsageWarningLog()
    monkeypatch.setattr("flexd.embedding.step.USAGE_WARNINGS", log)
    monkeypatch.setattr(RowGate, "warned", False)
    collection, dense = make(), torch.nn.Parameter(torch.zeros(3))
    optimizer = flexd.JoinedOptimizer(torch.optim.SGD([dense], 0.1), collection.optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)

    def step(clip: bool) -> None:
        backward(collection, 1)
        dense.grad = torch.ones(3)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1.0)
        if clip:
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach)
        scaler.step(optimizer)
        scaler.update()

    with caplog.at_level(logging.WARNING):
        step(clip=False)
        assert log.reports() == (), "its own clipping and GradScaler compute no norm of the gate"
        step(clip=True)
        step(clip=True)
    (report,) = log.reports()
    assert report.kind == "clipped_by_torch"
    assert report.count >= 2
    warned = [record.message for record in caplog.records if record.name == "flexd.embedding.step"]
    assert [message.count("flexd.JoinedOptimizer") for message in warned] == [1]


def test_small_half_precision_gradients_are_unscaled_wide() -> None:
    """2e-8 is 0 in float16; 2e-8 * 2^12 is not."""
    collection = make("float16", lr=1e5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    before = collection.gather_table("item").float()
    scaler.scale(collection(ids(3))["item"].values.float().sum() * 2e-8).backward()
    scaler.step(collection.optimizer)
    change = before[3] - collection.gather_table("item")[3].float()
    np.testing.assert_allclose(change.numpy(), 1e5 * 2e-8, rtol=0.05)


def test_no_chunk_is_applied_while_gradients_wait() -> None:
    collection = make()
    backward(collection, 1)
    collection.clip_grad_norm_(1.0)
    collection.engine.inbox.offer(1, Delta(np.array([1, 2]), np.zeros(2, np.uint8), np.full(2, 2, np.uint8)))
    versions = []
    for step in range(6):
        with torch.no_grad():
            collection(ids(1))
        if step == 2:
            collection.optimizer.step()
        versions.append(collection.placement_version)
    assert versions == [0, 0, 0, 1, 1, 1]
