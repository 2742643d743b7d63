"""Alignment of sequences and padding of the demo's model."""

from __future__ import annotations

import torch

from flexd.demo.model import NextItem, right_aligned


def test_sequences_are_aligned_to_the_right_and_padded_with_zeros() -> None:
    rows = torch.arange(1.0, 7.0).unsqueeze(1)
    order = torch.tensor([5, 0, 1, 2, 4, 3])
    sequences, mask = right_aligned(rows, order, torch.tensor([1, 3, 2]), width=3)
    assert sequences.squeeze(2).tolist() == [[0, 0, 6], [1, 2, 3], [0, 5, 4]]
    assert mask.tolist() == [[False, False, True], [True, True, True], [False, True, True]]


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
