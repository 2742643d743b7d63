"""Alignment of sequences and padding of the demo's model."""

from __future__ import annotations

import torch

from flexd.demo.training import NextItem, right_aligned


def test_padding_has_no_part_in_loss_or_gradient() -> None:
    torch.manual_seed(0)
    model = NextItem(4, 3).double()
    rows = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    sequences, mask = right_aligned(rows, torch.arange(5), torch.tensor([2, 3]), width=4)
    loss = model(sequences, mask)
    noisy = sequences + torch.randn_like(sequences) * ~mask.unsqueeze(2)
    assert torch.equal(model(noisy, mask), loss)
    loss.backward()
    assert torch.isfinite(rows.grad).all()
    assert (rows.grad.abs().sum(dim=1) > 0).all()
