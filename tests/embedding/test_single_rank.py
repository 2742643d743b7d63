"""The collection in one process against plain torch: optimizers, schedules, gradients in every order torch allows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import flexd
from flexd.control.protocol.report import StepReport
from flexd.core.errors import ConfigError, EmbeddingError
from flexd.core.placement import Delta
from flexd.embedding.connect import Connection, _agreed_attempt
from flexd.embedding.exchange.collectives import TrafficKind

LENGTHS = torch.tensor([4])


def ids(*rows: int) -> dict[str, flexd.Jagged]:
    return {"item": flexd.Jagged(torch.tensor(rows, dtype=torch.int64), torch.tensor([len(rows)]))}


def pair(lr: float = 0.3, **more: object) -> tuple[flexd.EmbeddingCollection, nn.Embedding]:
    """A collection and a plain table of equal rows."""
    collection = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("item", 20, 4, dtype="float64")], optimizer=flexd.SGD(lr), **more
    )  # type: ignore[arg-type]
    return collection, nn.Embedding.from_pretrained(collection.initial_table("item"), freeze=False)


def close(collection: flexd.EmbeddingCollection, plain: nn.Embedding) -> bool:
    return torch.allclose(collection.gather_table("item"), plain.weight.detach(), rtol=0, atol=1e-12)


SCHEDULERS: list[Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = [
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1),
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
]


@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_learning_rate_schedules(schedule: Callable[..., torch.optim.lr_scheduler.LRScheduler]) -> None:
    collection, plain = pair()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    ours, theirs = schedule(collection.optimizer), schedule(optimizer)
    for step in range(6):
        rows = (step, step + 1, step, 19)
        optimizer.zero_grad()
        collection(ids(*rows))["item"].values.sin().sum().backward()
        plain(torch.tensor(rows)).sin().sum().backward()
        collection.optimizer.step()
        optimizer.step()
        ours.step()
        theirs.step()
        assert collection.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert close(collection, plain)


def test_the_optimizer_state_dict_keeps_the_learning_rate() -> None:
    collection, _ = pair()
    collection.optimizer.param_groups[0]["lr"] = 0.07
    other, _ = pair()
    other.optimizer.load_state_dict(collection.optimizer.state_dict())
    before = other.gather_table("item")
    other(ids(3))["item"].values.sum().backward()
    other.optimizer.step()
    assert torch.allclose(before[3] - other.gather_table("item")[3], torch.full((4,), 0.07, dtype=torch.float64))


@pytest.mark.parametrize("when", ["before forward", "before backward"])
def test_zero_grad_in_either_usual_place(when: str) -> None:
    """`zero_grad` between forward and backward is as common as before forward; neither may lose the step."""
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


def test_zero_grad_forgets_a_backward_pass() -> None:
    """A skipped step (a gradient overflow, say) leaves nothing behind."""
    collection, plain = pair()
    collection(ids(1, 2))["item"].values.sum().backward()
    collection.optimizer.zero_grad()
    collection(ids(2, 3))["item"].values.sum().backward()
    collection.optimizer.step()
    plain(torch.tensor([2, 3])).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.3).step()
    assert close(collection, plain)


def test_backward_twice_sums() -> None:
    collection, plain = pair()
    loss = collection(ids(1, 1, 4))["item"].values.sin().sum()
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    (3 * plain(torch.tensor([1, 1, 4])).sin().sum()).backward()
    collection.optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.3).step()
    assert close(collection, plain)


def test_a_closure_is_run_with_gradients() -> None:
    collection, plain = pair()

    def closure() -> torch.Tensor:
        loss = collection(ids(1, 2))["item"].values.sin().sum()
        loss.backward()
        return loss

    expected = plain(torch.tensor([1, 2])).sin().sum()
    assert torch.allclose(collection.optimizer.step(closure), expected)
    expected.backward()
    torch.optim.SGD(plain.parameters(), lr=0.3).step()
    assert close(collection, plain)


def test_a_step_without_a_forward_pass_does_nothing() -> None:
    collection, plain = pair()
    called = []
    collection.engine.after_step = lambda: called.append(1)
    collection.optimizer.step()
    assert collection.steps == 0
    assert not called
    assert close(collection, plain)


def test_too_many_passes_without_a_step() -> None:
    collection, _ = pair()
    for _ in range(64):
        collection(ids(1))
    with pytest.raises(EmbeddingError, match=r"64 forward passes without a step.*no_grad"):
        collection(ids(1))
    with torch.no_grad():
        collection(ids(1))
    collection.optimizer.step()
    collection(ids(1))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_leaves_nothing_pending(context: Callable[[], torch.no_grad]) -> None:
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


class _Heard:
    """Stands for an agent."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def report(self, report: StepReport) -> None:
        self.reports.append(report)

    def stop(self, timeout_seconds: float) -> None:
        pass


def test_reports_of_the_steps_add_up_to_the_totals() -> None:
    collection, _ = pair()
    with torch.no_grad():
        collection(ids(1, 2, 3))
    before = collection.traffic.totals()
    heard = _Heard()
    connection = Connection(collection, heard)  # type: ignore[arg-type]
    for step in range(4):
        collection(ids(*range(step + 1)))["item"].values.sum().backward()
        with collection.traffic.kind(TrafficKind.SYNC):
            collection.traffic.sent(step, 10 * step)
        collection.optimizer.step()
    connection.close()
    collection(ids(1))["item"].values.sum().backward()
    collection.optimizer.step()
    assert [report.step for report in heard.reports] == [1, 2, 3, 4]
    assert [report.accesses_by_tier for report in heard.reports] == [(1, 0, 0), (2, 0, 0), (3, 0, 0), (4, 0, 0)]
    assert [(report.sync_intra_bytes, report.sync_inter_bytes) for report in heard.reports] == [
        (step, 10 * step) for step in range(4)
    ]
    assert before["home_accesses"] == 3


def test_connecting_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    collection, _ = pair()
    monkeypatch.delenv("FLEXD_CONTROL", raising=False)
    with pytest.raises(ConfigError, match="FLEXD_CONTROL"):
        flexd.connect(collection, job="job")
    empty = tmp_path / "secret"
    empty.write_text("\n")
    for path, cause in ((empty, "empty"), (tmp_path / "none", "secret")):
        with pytest.raises(ConfigError, match=cause):
            flexd.connect(collection, "127.0.0.1:1", job="job", secret_file=path)


def test_an_attempt_is_new_at_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun calls every run "none" that was not given an id."""
    for run in (None, "none"):
        if run is None:
            monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        else:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
        attempts = {_agreed_attempt(torch.device("cpu")) for _ in range(3)}
        assert len(attempts) == 3
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert _agreed_attempt(torch.device("cpu")) == "job-7-2"


def test_copied_bytes_of_a_step_are_capped() -> None:
    """Rows of 32 bytes, 100 bytes a step. A chunk above the cap is applied alone, a demotion costs nothing."""
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


def test_nothing_of_the_collection_shows_in_the_parameters() -> None:
    """DDP and dense optimizers must not see the tables."""
    collection, _ = pair()
    assert list(collection.parameters()) == []
    assert list(collection.buffers()) == []


def test_unequal_state_dicts_are_refused() -> None:
    collection, _ = pair()
    saved = collection.state_dict()
    other = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("item", 20, 4, dtype="float64"), flexd.EmbeddingTable("b", 3, 2)]
    )
    with pytest.raises(RuntimeError, match="with other tables"):
        other.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="saved by rank 1 of 4, loaded by rank 0 of 1"):
        collection.load_state_dict({**saved, "rank0.shard": torch.tensor([1, 4, int(saved["rank0.shard"][2]), 0])})
    with pytest.raises(RuntimeError, match=r"rank0\.group0\.rows: shape \(3, 4\)"):
        collection.load_state_dict({**saved, "rank0.group0.rows": torch.zeros(3, 4)})
    of_another = {key.replace("rank0", "rank2"): value for key, value in saved.items()}
    of_another["rank2.shard"] = torch.tensor([2, 3, *saved["rank0.shard"][2:].tolist()])
    with pytest.raises(RuntimeError, match="saved by rank 2 of 3, loaded by rank 0 of 1"):
        collection.load_state_dict(of_another)
    for key in saved:
        with pytest.raises(RuntimeError, match=f"Missing key.*{key}"):
            collection.load_state_dict({name: value for name, value in saved.items() if name != key})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*rank0\.group1\.rows"):
        collection.load_state_dict({**saved, "rank0.group1.rows": torch.zeros(1)})
    collection.load_state_dict({"rank0.group0.rows": saved["rank0.group0.rows"] + 1}, strict=False)
    assert torch.equal(collection.gather_table("item"), saved["rank0.group0.rows"] + 1)


def test_a_state_dict_is_a_copy() -> None:
    collection, _ = pair()
    model = nn.ModuleDict({"towers": nn.ModuleDict({"emb": collection})})
    saved = model.state_dict()
    before = collection.gather_table("item")
    collection(ids(1))["item"].values.sum().backward()
    collection.optimizer.step()
    assert torch.equal(saved["towers.emb.rank0.group0.rows"], before)
    model.load_state_dict(saved)
    assert torch.equal(collection.gather_table("item"), before)
