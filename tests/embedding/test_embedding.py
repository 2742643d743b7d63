"""``flexd.Embedding`` in the place of ``nn.Embedding``, alone and by ``flexd.embed_all``: equal training, ``.weight``,
padding, errors."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.placement import Delta, RankLayout
from flexd.embedding import row_optimizers
from tests.support.rank_pool import Job, Ranks, error_of

ITEMS, USERS, DIM, SAMPLES, LENGTH, STEPS = 41, 17, 6, 5, 7, 6


@dataclass(frozen=True)
class Batch:
    """int64 [samples, length] with padding 0, and [samples]."""

    history: torch.Tensor
    users: torch.Tensor
    liked: torch.Tensor
    other: torch.Tensor


def batch(step: int, rank: int) -> Batch:
    rng = np.random.default_rng([11, step, rank])
    history = rng.integers(1, ITEMS, (SAMPLES, LENGTH))
    history[np.arange(LENGTH) < rng.integers(0, LENGTH, (SAMPLES, 1))] = 0
    pairs = rng.integers(1, ITEMS, (2, SAMPLES))
    return Batch(*map(torch.from_numpy, (history, rng.integers(0, USERS, SAMPLES), pairs[0], pairs[1])))


class Recommender(nn.Module):
    """Items (with padding), users and a dense layer. All values are drawn, that of the padding row too."""

    def __init__(self, softmax: bool, seed: int = 3) -> None:
        super().__init__()
        self.softmax = softmax
        self.items = nn.Embedding(ITEMS, DIM, padding_idx=0, dtype=torch.float64)
        self.users = nn.ModuleDict({"embedding": nn.Embedding(USERS, DIM, dtype=torch.float64)})
        self.dense = nn.Linear(DIM, DIM, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)

    def forward(self, given: Batch) -> torch.Tensor:
        state = self.state(given)
        if self.softmax:
            return functional.cross_entropy(state @ self.items.weight.T, given.liked)
        return -functional.logsigmoid(((self.items(given.liked) - self.items(given.other)) * state).sum(1)).mean()

    def state(self, given: Batch) -> torch.Tensor:
        users: torch.Tensor = self.users["embedding"](given.users)
        return torch.tanh(self.dense(self.items(given.history).mean(1) + users))

    def scores(self, given: Batch) -> torch.Tensor:
        """Return [samples, items] as a framework does that ranks all items."""
        return self.state(given) @ self.items.weight.T


@dataclass(frozen=True)
class Training:
    """A training to compare.

    Attributes:
        softmax: the loss is a softmax over all items, through ``.weight``; else BPR.
        optimizer: "sgd", "adam" or "adamw".
        max_norm, norm_type: of all gradients together; 0: no clipping.
        scheduler: "", "one cycle" or "step".
        scaled: with a GradScaler, and the loss of the last rank overflows in step 1.
        frozen: the embedding of the users is not trained.
    """

    softmax: bool = False
    optimizer: str = "sgd"
    max_norm: float = 0.0
    norm_type: float = 2.0
    scheduler: str = ""
    scaled: bool = False
    frozen: bool = False


def recommender(case: Training, seed: int = 3) -> Recommender:
    model = Recommender(case.softmax, seed)
    model.users.requires_grad_(not case.frozen)
    return model


def dense_optimizer(case: Training, parameters: Any) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.2)
    kind = torch.optim.Adam if case.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=0.05, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)


def row_optimizer(case: Training) -> Any:
    if case.optimizer == "sgd":
        return flexd.SGD(0.2)
    return flexd.DenseAdam(0.05, (0.8, 0.95), 1e-3, weight_decay=0.1, decoupled_weight_decay=case.optimizer == "adamw")


def schedule(case: Training, optimizer: torch.optim.Optimizer) -> Any:
    if case.scheduler == "one cycle":
        momentum = "betas" in optimizer.defaults
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=STEPS + 2, cycle_momentum=momentum)
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5 if case.scheduler == "step" else 1.0)


def factor_of(case: Training, step: int, rank: int, world_size: int) -> float:
    return math.inf if case.scaled and step == 1 and rank == world_size - 1 else 1.0


def own(rank: int, layout: RankLayout, case: Training) -> dict[str, Any]:
    """Train with ``flexd.Embedding`` modules that have a collection each."""
    model = recommender(case)
    for parent, name, plain in ((model, "items", model.items), (model.users, "embedding", model.users["embedding"])):
        given = {"name": name, "layout": layout, "optimizer": row_optimizer(case)}
        if plain.weight.requires_grad:
            made = flexd.Embedding(plain.num_embeddings, DIM, plain.padding_idx, dtype=torch.float64, **given)
            made.load_rows(0, plain.weight.detach())
        else:
            weight = plain.weight if rank == 0 else torch.zeros_like(plain.weight)
            made = flexd.Embedding.from_pretrained(weight, padding_idx=plain.padding_idx, **given)
        setattr(parent, name, made) if parent is model else model.users.update({name: made})
    return train(rank, layout, case, model, [model.items.collection, model.users["embedding"].collection])


def embedded(rank: int, layout: RankLayout, case: Training) -> dict[str, Any]:
    """Train with all embeddings in one collection; ranks other than 0 draw other values before."""
    model = recommender(case, seed=3 if rank == 0 else 100 + rank)
    tables = flexd.embed_all(model, optimizer=row_optimizer(case), layout=layout, replica_slots=[ITEMS + USERS])
    return train(rank, layout, case, model, [tables])


def train(
    rank: int, layout: RankLayout, case: Training, model: Recommender, collections: list[flexd.EmbeddingCollection]
) -> dict[str, Any]:
    wrapped = DistributedDataParallel(model) if layout.world_size > 1 else model
    optimizer = flexd.JoinedOptimizer(
        dense_optimizer(case, wrapped.parameters()), *(each.optimizer for each in collections)
    )
    scheduler = schedule(case, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=case.scaled)
    losses, norms = [], []
    for step in range(STEPS):
        if step == 2:
            for each in collections:
                keys = np.arange(0, sum(each.replica_slots), 3, dtype=np.int64)
                if len(keys):
                    each.engine.inbox.offer(1, Delta(keys, np.zeros(len(keys), np.uint8), 1 + (keys % 2).astype("u1")))
        optimizer.zero_grad()
        loss = wrapped(batch(step, rank))
        scaler.scale(loss * factor_of(case, step, rank, layout.world_size)).backward()
        if case.max_norm:
            scaler.unscale_(optimizer)
            norms.append(float(optimizer.clip_grad_norm_(case.max_norm, case.norm_type)))
        with mock.patch.object(row_optimizers, "_DENSE_BLOCK", 7 * DIM):  # several blocks of a table
            scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(float(loss.detach()))
    model.eval()
    scores = model.scores(batch(99, rank)).detach().numpy()
    return {
        "losses": losses, "norms": norms, "scores": scores, "lr": [g["lr"] for g in optimizer.param_groups],
        "tables": [model.items.weight.numpy(), model.users["embedding"].weight.numpy()],
        "dense": model.dense.weight.detach().numpy(), "parameters": [name for name, _ in model.named_parameters()],
        "versions": [each.placement_version for each in collections],
        "equal": all(each.replicas_bit_equal() for each in collections),
        "pending": [len(each.engine.passes) for each in collections],
    }  # fmt: skip


def train_alone(world_size: int, case: Training) -> dict[str, Any]:
    """Train the plain model with one optimizer over the batches of all ranks."""
    model = recommender(case)
    optimizer = dense_optimizer(case, model.parameters())
    scheduler = schedule(case, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=case.scaled)
    losses: list[list[float]] = [[] for _ in range(world_size)]
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world_size):
            loss = model(batch(step, rank))
            scaler.scale(loss * factor_of(case, step, rank, world_size) / world_size).backward()
            losses[rank].append(float(loss.detach()))
        if case.max_norm:
            scaler.unscale_(optimizer)
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm, case.norm_type)))
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    with torch.no_grad():
        scores = [model.scores(batch(99, rank)).numpy() for rank in range(world_size)]
    return {
        "losses": losses, "norms": norms, "scores": scores, "lr": optimizer.param_groups[0]["lr"],
        "tables": [model.items.weight.detach().numpy(), model.users["embedding"].weight.detach().numpy()],
        "dense": model.dense.weight.detach().numpy(),
    }  # fmt: skip


def faults(rank: int, layout: RankLayout) -> list[str]:
    """Give one rank input that cannot be looked up; every rank must raise an error, and go on."""
    items = flexd.Embedding(ITEMS, DIM, layout=layout)
    texts = []
    one = torch.tensor([1])
    bad_inputs: list[Any] = [
        torch.tensor([[1, ITEMS]]), torch.tensor([0.5]), [1, 2], torch.tensor([-1]), flexd.Jagged(one, one),
        (one, torch.tensor([0, 1])), torch.nested.nested_tensor([one], layout=torch.jagged), one.to_sparse(),
    ]  # fmt: skip
    for bad in bad_inputs:
        texts.append(error_of(items, bad if rank == layout.world_size - 1 else torch.tensor([[1, 2]])))
        items(torch.tensor(3)).sum().backward()
        items.optimizer.step()
    return texts


FOUR = RankLayout(2, 2)
TRAININGS = [
    Training(),
    Training(softmax=True, max_norm=0.2, norm_type=math.inf, scheduler="step"),
    Training(optimizer="adam", max_norm=0.3, scheduler="one cycle"),
    Training(optimizer="adamw", softmax=True),
    Training(optimizer="adam", max_norm=0.3, norm_type=1.0, scaled=True),
    Training(optimizer="adam", max_norm=0.3, frozen=True),
]


@pytest.mark.parametrize("job", [embedded, own])
@pytest.mark.parametrize("case", TRAININGS, ids=str)
def test_training_is_that_of_plain_embeddings_and_one_optimizer(ranks: Ranks, job: Job, case: Training) -> None:
    results, expected = ranks(4).run(job, FOUR, case), train_alone(4, case)
    for rank, result in enumerate(results):
        np.testing.assert_allclose(result["losses"], expected["losses"][rank], rtol=0, atol=1e-9)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=0, atol=1e-9)
        np.testing.assert_allclose(result["scores"], expected["scores"][rank], rtol=0, atol=1e-9)
        np.testing.assert_allclose(result["lr"], expected["lr"], rtol=0, atol=1e-12)
        np.testing.assert_allclose(result["dense"], expected["dense"], rtol=0, atol=1e-9)
        for table, plain in zip(result["tables"], expected["tables"], strict=True):
            np.testing.assert_allclose(table, plain, rtol=0, atol=1e-9)
        assert result["parameters"] == ["dense.weight", "dense.bias"]
        assert result["versions"] == ([1] if job is embedded else [1, 1])
        assert result["equal"]
        assert not any(result["pending"])


def test_inputs_that_cannot_be_looked_up_are_errors_on_every_rank(ranks: Ranks) -> None:
    *others, last = ranks(4).run(faults, FOUR)
    assert others == [["EmbeddingError: rank 3 has input that cannot be looked up - see the error of rank 3"] * 8] * 3
    parts = (
        f"row {41} of table", "torch.float32", "a list instead of", "row -1", "a Jagged instead of a dense tensor",
        "a tuple instead of", "layout torch.jagged instead of", "layout torch.sparse_coo instead of",
    )  # fmt: skip
    for text, part in zip(last, parts, strict=True):
        assert part in text
    assert "embedding.collection({'embedding': ids})" in last[4]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0), (0,), (2, 1, 4)])
@pytest.mark.parametrize("padding_idx", [None, 0, -1])
def test_rows_and_gradients_are_those_of_nn_embedding(shape: tuple[int, ...], padding_idx: int | None) -> None:
    ours = flexd.Embedding(5, 3, padding_idx, dtype=torch.float64, optimizer=flexd.SGD(1.0))
    values = torch.arange(15, dtype=torch.float64).view(5, 3)
    ours.load_rows(0, values)
    plain = nn.Embedding.from_pretrained(values.clone(), freeze=False, padding_idx=padding_idx)
    assert ours.padding_idx == plain.padding_idx
    for ids in (torch.randint(0, 5, shape), torch.full(shape, 4), torch.zeros(shape, dtype=torch.int32)):
        got, expected = ours(ids), plain(ids)
        assert torch.equal(got, expected)
        plain.weight.grad = None
        for rows in (got, expected):
            rows.sin().sum().backward()
        ours.optimizer.step()
        with torch.no_grad():
            plain.weight -= plain.weight.grad
        torch.testing.assert_close(ours.weight.detach(), plain.weight.detach(), rtol=0, atol=1e-12)
        ours.optimizer.zero_grad()
        ours.optimizer.step()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.items.weight


class Twice(nn.Module):
    """One module at two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(5, 3)
        self.inner = nn.ModuleDict({"products": self.items, "positions": nn.Embedding(4, 3)})


def in_ddp() -> nn.Module:
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = nn.Sequential(nn.Embedding(5, 3))
    return wrapper


@pytest.mark.parametrize(
    ("make", "names", "text"),
    [
        (Tied, None, "items shares its weight with out.weight"),
        (lambda: nn.Sequential(nn.Embedding(5, 3, device="meta")), None, "modules on meta"),
        (in_ddp, None, "DistributedDataParallel"),
        (Twice, ["shop", "inner"], "no nn.Embedding at shop, inner - one of items, inner.products, inner.positions"),
        (lambda: nn.Sequential(nn.Linear(1, 1)), None, "no nn.Embedding - make"),
        (lambda: nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)), None, "0 has max_norm"),
        (lambda: nn.Sequential(nn.Embedding(5, 3, scale_grad_by_freq=True)), None, "0 has max_norm"),
    ],
)
def test_what_cannot_be_replaced_is_named(make: Callable[[], nn.Module], names: list[str] | None, text: str) -> None:
    model = make()
    before = dict(model.named_modules())
    with pytest.raises(EmbeddingError, match=text):
        flexd.embed_all(model, names=names)
    assert dict(model.named_modules()) == before


def test_a_module_at_two_paths_stays_one() -> None:
    model = Twice()
    values = model.items.weight.detach().clone()
    tables = flexd.embed_all(model, names=["items"])
    assert model.items is model.inner["products"]
    assert type(model.inner["positions"]) is nn.Embedding
    assert [table.name for table in tables.tables] == ["items"]
    assert torch.equal(model.items.weight.detach(), values)
