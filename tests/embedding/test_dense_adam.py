"""``flexd.DenseAdam`` against ``torch.optim.Adam``, with its momentum of rows that a step does not look up."""

from __future__ import annotations

import pytest
import torch

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.layout import RankLayout
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


def test_a_row_is_bit_equal_on_every_holder() -> None:
    """A copy has another slot, in a store of another size."""
    torch.manual_seed(2)
    rows, copies = torch.randn(ROWS, DIM), torch.randn(3, DIM)
    states = torch.zeros(ROWS, 2 * DIM), torch.zeros(3, 2 * DIM)
    copies[:2] = rows[[20, 4]]
    optimizer = flexd.DenseAdam(0.1)
    for step in range(1, 20):
        grads = torch.randn(1, DIM)
        with_row = step % 3 == 0  # row 20 is looked up; row 4 never is
        for table, state, slot in ((rows, states[0], 20), (copies, states[1], 0)):
            given = [(torch.tensor([slot]), grads)] if with_row else []
            optimizer.update_groups([GroupUpdate(table, state, given)], step)
        assert torch.equal(copies[:2], rows[[20, 4]])
        assert torch.equal(states[1][:2], states[0][[20, 4]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_copies_of_narrow_rows_are_rounded_by_their_keys(dtype: torch.dtype) -> None:
    rows, state = torch.ones(ROWS, DIM).to(dtype), torch.zeros(ROWS, 2 * DIM)
    copies, of_copies = torch.ones(2, DIM).to(dtype), torch.zeros(2, 2 * DIM)
    optimizer = flexd.DenseAdam(1e-3)
    for step in range(1, 12):
        grads = torch.full((1, DIM), 0.3)
        first = step == 1
        optimizer.update(rows, state, torch.tensor([7] if first else []).long(), grads[:first], step, lambda at: at)
        optimizer.update(
            copies, of_copies, torch.tensor([0] if first else []).long(), grads[:first], step, lambda at: at + 7
        )
        assert torch.equal(copies, rows[7:9])
    assert (rows[7] != 1).any()


def test_lazy_adam_is_another_training() -> None:
    """The case for it: momentum of rows that are looked up once moves them for many steps."""
    moved = []
    for optimizer in (flexd.Adam(0.01), flexd.DenseAdam(0.01)):
        items = flexd.Embedding(ROWS, DIM, optimizer=optimizer)
        before = items.weight.detach().clone()
        items(torch.tensor([3])).sum().backward()
        items.optimizer.step()
        for _ in range(20):
            items(torch.tensor([4])).sum().backward()
            items.optimizer.step()
        after = items.weight.detach()
        assert torch.equal(after[5], before[5]), "no gradient yet: no momentum"
        moved.append(float((after[3] - before[3]).abs().max()))
    assert moved[0] == pytest.approx(0.01, rel=1e-3)
    assert moved[1] > 0.02


def test_rows_in_two_memories_are_refused() -> None:
    with pytest.raises(EmbeddingError, match="fast_memory_bytes with DenseAdam"):
        flexd.EmbeddingCollection(
            [flexd.EmbeddingTable("items", 50, 4)], layout=RankLayout(1, 1), optimizer=flexd.DenseAdam(),
            fast_memory_bytes=1000,
        )  # fmt: skip


def test_a_checkpoint_of_either_adam_is_one_of_the_other(tmp_path) -> None:  # type: ignore[no-untyped-def]
    def make(optimizer: flexd.Adam) -> flexd.EmbeddingCollection:
        return flexd.EmbeddingCollection([flexd.EmbeddingTable("items", ROWS, DIM)], optimizer=optimizer)

    lazy, dense = make(flexd.Adam(0.1)), make(flexd.DenseAdam(0.1))
    lazy({"items": torch.tensor([3])})["items"].values.sum().backward()
    lazy.optimizer.step()
    flexd.save_checkpoint(lazy, tmp_path / "saved")
    flexd.load_checkpoint(dense, tmp_path / "saved")
    assert torch.equal(dense.engine.stores[0].state, lazy.engine.stores[0].state)
    assert dense.engine.stores[0].state.any()
    assert dense.steps == 1
