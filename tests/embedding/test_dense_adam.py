"""``flexd.DenseAdam`` against ``torch.optim.Adam``, with its momentum of rows that a step does not look up."""

from __future__ import annotations

import pytest
import torch

import flexd
from flexd.embedding import dense_adam
from flexd.embedding.row_optimizers import GroupUpdate

ROWS, DIM = 23, 5


def some_rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return distinct slots in any order, none in some steps, and their gradients."""
    generator = torch.Generator().manual_seed(step)
    slots = torch.randperm(ROWS, generator=generator)[: (step * 7) % 12]
    return slots, torch.randn((len(slots), DIM), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("numbers", [1, 7 * DIM, 1 << 16])
@pytest.mark.parametrize(("decay", "decoupled"), [(0.0, False), (0.1, False), (0.1, True)])
def test_all_rows_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, numbers: int, decay: float, decoupled: bool
) -> None:
    monkeypatch.setattr(dense_adam, "_BLOCK_NUMBERS", numbers)
    rows = torch.randn((ROWS, DIM), generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    state = torch.zeros((ROWS, 2 * DIM), dtype=torch.float64)
    plain = torch.nn.Parameter(rows.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    dense = kind([plain], lr=0.05, betas=(0.8, 0.95), eps=1e-3, weight_decay=decay)
    for step in range(1, 30):
        dense.param_groups[0]["lr"] = 0.05 / step**0.5
        ours = flexd.DenseAdam(
            0.05 / step**0.5, (0.8, 0.95), 1e-3, weight_decay=decay, decoupled_weight_decay=decoupled
        )
        slots, grads = some_rows(step)
        plain.grad = torch.zeros_like(plain).index_copy_(0, slots, grads)
        dense.step()
        halves = [(slots[:3], grads[:3]), (slots[3:], grads[3:])]
        ours.update_groups([GroupUpdate(rows, state, halves)], step)
        torch.testing.assert_close(rows, plain.detach(), rtol=0, atol=1e-12)
