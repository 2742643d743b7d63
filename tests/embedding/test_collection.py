"""The collection in one process against plain torch: gradients in every order that torch allows, evaluation, limits."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import flexd
from flexd.core.errors import EmbeddingError, TopologyError
from flexd.core.placement import Delta, RankLayout
from flexd.embedding import devices
from tests.support.collection_jobs import close, ids, pair


def test_invalid_arguments_are_refused() -> None:
    table = flexd.EmbeddingTable("item", 10, 4)
    with pytest.raises(TopologyError, match="layout of 2 nodes x 2 local ranks"):
        flexd.EmbeddingCollection([table], layout=RankLayout(2, 2))
    for name, value in (("copies_memory_bytes", -1), ("replica_slots", [1, 2]), ("replica_slots", [-1])):
        with pytest.raises(EmbeddingError, match=name):
            flexd.EmbeddingCollection([table], layout=RankLayout(1, 1), **{name: value})
    with pytest.raises(EmbeddingError, match="'ring'"):
        flexd.EmbeddingCollection([table], layout=RankLayout(1, 1), exchange="ring")


def test_memory_for_copies_is_a_share_of_what_the_container_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = tmp_path / "memory.max", tmp_path / "limit_in_bytes"
    monkeypatch.setattr(devices, "_CONTAINER_LIMITS", tuple(map(str, limits)))
    table, layout = flexd.EmbeddingTable("item", 10**6, 4), RankLayout(1, 1)
    of_host = flexd.EmbeddingCollection([table], layout=layout).copies_memory_bytes
    limits[0].write_text("max\n")
    assert flexd.EmbeddingCollection([table], layout=layout).copies_memory_bytes == of_host
    limits[1].write_text("1600000\n")
    small = flexd.EmbeddingCollection([table], layout=layout)
    assert (small.copies_memory_bytes, small.replica_slots) == (16_000, (1_000,))


def test_tables_are_made_on_the_device_that_is_given_and_stay_there() -> None:
    """In a model that is constructed on ``meta``, as users of FSDP2 do."""
    table = flexd.EmbeddingTable("item", 10, 4)
    with torch.device("meta"):
        with pytest.raises(EmbeddingError, match="tables on meta have no values - give the collection the device"):
            flexd.EmbeddingCollection([table])
        items = flexd.Embedding(10, 4, padding_idx=3, device="cpu")
        model = torch.nn.ModuleList([items, torch.nn.Linear(4, 4)])
    rows = items.weight.detach().clone()
    assert torch.equal(rows[3], torch.zeros(4))
    model.to_empty(device="cpu").half()
    assert torch.equal(items.weight.detach(), rows)
    with pytest.raises(EmbeddingError, match="are on cpu and cannot be moved to meta"):
        model.to("meta")


@pytest.mark.parametrize("when", ["before forward", "before backward"])
def test_zero_grad_before_or_after_the_forward_pass(when: str) -> None:
    """``zero_grad`` is common before forward and between forward and backward: neither may lose the step."""
    collection, plain = pair()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    for step in range(3):
        if when == "before forward":
            collection.optimizer.zero_grad()
        loss = collection(ids(step, 5, 5))["item"].values.sin().sum()
        if when == "before backward":
            collection.optimizer.zero_grad()
        loss.backward()
        collection.optimizer.step()
        optimizer.zero_grad()
        plain(torch.tensor([step, 5, 5])).sin().sum().backward()
        optimizer.step()
        assert close(collection, plain)


def test_too_many_passes_without_a_step_are_refused() -> None:
    collection, _ = pair()
    kept = [collection(ids(1)) for _ in range(64)]
    with pytest.raises(EmbeddingError, match=r"64 forward passes without a step.*no_grad"):
        collection(ids(1))
    with torch.no_grad():
        collection(ids(1))
    collection.optimizer.step()
    kept.append(collection(ids(1)))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_leaves_no_pending_pass(context: Callable[[], torch.no_grad]) -> None:
    collection, plain = pair()
    with context():
        for _ in range(100):
            out = collection(ids(1, 2))["item"].values
    assert not out.requires_grad
    collection.eval()
    assert not collection(ids(1))["item"].values.requires_grad
    collection.train()
    collection.optimizer.step()
    assert collection.steps == 0
    assert close(collection, plain)


def test_copied_bytes_of_a_step_are_capped() -> None:
    """Rows have 32 bytes, the cap is 100 bytes per step. A larger chunk is applied alone; a demotion needs no bytes."""
    collection, _ = pair(max_migration_bytes_per_step=100)
    moves = [([0, 1], 2), ([2], 2), ([3], 2), ([0, 1, 2, 3], 0), ([4, 5, 6, 7, 8], 1), ([9], 1)]
    tiers = np.zeros(20, dtype=np.uint8)
    for version, (keys, tier) in enumerate(moves, 1):
        new = np.full(len(keys), tier, dtype=np.uint8)
        collection.engine.inbox.offer(version, Delta(np.array(keys), tiers[keys], new))
        tiers[keys] = tier
    versions = []
    for _ in range(6):
        with torch.no_grad():
            collection(ids(1))
        versions.append(collection.placement_version)
    assert versions == [0, 2, 4, 5, 6, 6]
