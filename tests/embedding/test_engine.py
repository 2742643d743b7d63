"""The engine: passes that wait for a step."""

from __future__ import annotations

import torch

import flexd


def test_two_backward_passes_over_one_forward_pass_are_added_in_float32() -> None:
    """2048 + 1 + 1 is 2048 in float16."""
    collection = flexd.EmbeddingBagCollection(
        [flexd.EmbeddingBagTable("item", 9, 4, dtype="float16")], optimizer=flexd.SGD(2.0**-10)
    )
    collection.load_rows("item", 0, torch.zeros(9, 4))
    bags = collection({"item": flexd.Jagged(torch.tensor([3]), torch.tensor([1]))})["item"]
    for weight in (2048.0, 1.0, 1.0):
        (bags * weight).sum().backward(retain_graph=True)
    collection.optimizer.step()
    assert torch.equal(collection.gather_table("item")[3], torch.full((4,), -2050.0 / 1024.0).half())
