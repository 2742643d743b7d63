"""``FusedOptimizer``: settings, schedules, state and ``step`` like a torch optimizer."""

from __future__ import annotations

import torch

import flexd
from flexd.embedding.row_optimizers import Adam, RowOptimizer


def collection(optimizer: RowOptimizer) -> flexd.EmbeddingCollection:
    return flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 20, 4, dtype="float64")], optimizer=optimizer)


def step(embedding: flexd.EmbeddingCollection, *rows: int) -> None:
    embedding({"item": flexd.Jagged(torch.tensor(rows), torch.tensor([len(rows)]))})[
        "item"
    ].values.sin().sum().backward()
    embedding.optimizer.step()


def test_settings_follow_the_parameter_group() -> None:
    """Schedulers: test_embedding.py."""
    made = collection(Adam(0.1))
    plain = torch.nn.Parameter(made.initial_table("item"))
    dense = torch.optim.Adam([plain], 0.1)
    for number in range(6):
        for optimizer in (made.optimizer, dense):
            optimizer.param_groups[0].update(
                weight_decay=0.1 * number, lr=torch.tensor(0.1 + number, dtype=torch.float64), eps=0.01 * number,
                betas=(0.9 - 0.1 * number, 0.999),
            )  # fmt: skip
        dense.zero_grad()
        plain.sin().sum().backward()
        dense.step()
        step(made, *range(20))
        torch.testing.assert_close(made.gather_table("item"), plain.detach(), rtol=0, atol=1e-7)


def test_the_state_dict_keeps_steps_and_settings() -> None:
    """Bias correction depends on the number of steps: a restored optimizer continues from it."""
    first, second = collection(Adam(0.1)), collection(Adam(0.9))
    for _ in range(3):
        step(first, 1, 2)
    saved = first.optimizer.state_dict()
    second.optimizer.load_state_dict(saved)
    assert second.steps == 3
    second.load_state_dict(first.state_dict())
    third = collection(Adam(0.1))
    third.load_state_dict(first.state_dict())
    assert third.steps == 3, "the tables' own state has the step too"
    for made in (first, second):
        step(made, 2, 3)
    assert torch.equal(first.gather_table("item"), second.gather_table("item"))
    assert second.steps == 4
