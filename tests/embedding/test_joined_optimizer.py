"""``flexd.JoinedOptimizer``: one optimizer of dense parameters and rows. Training and clipping: test_embedding.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flexd
from flexd.core.errors import EmbeddingError


def made(*, momentum: float = 0.0) -> tuple[nn.Parameter, flexd.Embedding, flexd.JoinedOptimizer]:
    dense = nn.Parameter(torch.ones(3))
    items = flexd.Embedding(5, 3, optimizer=flexd.SGD(0.5), seed=4)
    return dense, items, flexd.JoinedOptimizer(torch.optim.SGD([dense], lr=0.1, momentum=momentum), items.optimizer)


def test_the_state_of_dense_parameters_follows_a_load() -> None:
    dense, items, optimizer = made(momentum=0.5)
    (dense.sum() + items(torch.tensor(1)).sum()).backward()
    optimizer.step()
    fresh, rows, other = made(momentum=0.5)
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(other.state[fresh]["momentum_buffer"], optimizer.state[dense]["momentum_buffer"])
    assert rows.collection.steps == 1
    other.param_groups[0]["lr"] = 7.0
    assert other.optimizers[0].param_groups[0]["lr"] == 7.0
    with pytest.raises(EmbeddingError, match="a saved optimizer of 1 parameter groups, this one has 2"):
        other.load_state_dict(optimizer.optimizers[0].state_dict())


@pytest.mark.parametrize("where", ["dense", "rows", "nowhere"])
def test_an_overflow_of_one_part_skips_the_step_of_all(where: str) -> None:
    dense, items, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before, infinite = items.weight.detach().clone(), torch.tensor(float("inf"))
    for step in range(2):
        optimizer.zero_grad()
        factors = [infinite if step == 0 and where == part else torch.tensor(1.0) for part in ("dense", "rows")]
        scaler.scale(dense.sum() * factors[0] + items(torch.tensor([1])).sum() * factors[1]).backward()
        scaler.step(optimizer)
        scaler.update()
    steps = 2 if where == "nowhere" else 1
    torch.testing.assert_close(dense.detach(), torch.full((3,), 1 - 0.1 * steps))
    torch.testing.assert_close(items.weight[1].detach(), before[1] - 0.5 * steps)
    assert items.collection.steps == steps


def test_what_cannot_be_joined_is_refused() -> None:
    dense, items, _ = made()
    for optimizers in ((), (items.optimizer, items.optimizer), [torch.optim.SGD([dense], 0.1) for _ in range(2)]):
        with pytest.raises(EmbeddingError, match="JoinedOptimizer of"):
            flexd.JoinedOptimizer(*optimizers)
