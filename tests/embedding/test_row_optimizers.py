"""Each row optimizer against its counterpart in torch and FBGEMM."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import OPTIMIZERS, state_columns
from flexd.embedding import devices
from flexd.embedding.row_optimizers import SGD, Adagrad, Adam, GroupUpdate, RowOptimizer, RowWiseAdagrad, RowWiseAdam

ALL: list[RowOptimizer] = [SGD(0.1), Adagrad(0.1), RowWiseAdagrad(0.1), Adam(0.1), RowWiseAdam(0.1)]


def test_every_optimizer_of_a_table_is_tested() -> None:
    assert sorted(optimizer.name for optimizer in ALL) == sorted(OPTIMIZERS)


ROWS, DIM = 7, 5


Decay = dict[str, Any]


def start(optimizer: RowOptimizer, dtype: torch.dtype = torch.float64, dim: int = DIM) -> tuple[torch.Tensor, ...]:
    """Return rows and state."""
    rows = torch.randn(ROWS, dim, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    floats = sum(state_columns(optimizer.name, dim).values())
    return rows, torch.full((ROWS, floats), optimizer.initial_state, dtype=torch.promote_types(dtype, torch.float32))


def update(
    optimizer: RowOptimizer, ends: tuple[torch.Tensor, ...], index: torch.Tensor, grads: torch.Tensor, step: int
) -> None:
    """Apply one step to rows and state."""
    optimizer.update_groups([GroupUpdate(*ends, [(index, grads)], lambda slots: slots * 5)], step)


def gradients(step: int, index: torch.Tensor, dim: int = DIM) -> torch.Tensor:
    return torch.randn(len(index), dim, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


@pytest.mark.parametrize("decay", [{}, {"weight_decay": 0.3}, {"weight_decay": 0.3, "decoupled_weight_decay": True}])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda d: SGD(0.2, **d), lambda p, d: torch.optim.SGD(p, 0.2, **d)),
        (lambda d: Adagrad(0.2, **d), lambda p, d: torch.optim.Adagrad(p, 0.2, **d)),
        (
            lambda d: Adagrad(0.2, eps=0.1, initial_accumulator_value=0.5, **d),
            lambda p, d: torch.optim.Adagrad(p, 0.2, eps=0.1, initial_accumulator_value=0.5, **d),
        ),
        (lambda d: Adam(0.2, **d), lambda p, d: torch.optim.Adam(p, 0.2, **d)),
        (
            lambda d: Adam(0.2, (0.7, 0.8), 0.1, **d),
            lambda p, d: torch.optim.Adam(p, 0.2, (0.7, 0.8), 0.1, **d),
        ),
    ],
)
def test_updates_of_all_rows_equal_the_dense_optimizer(
    ours: Callable[[Decay], RowOptimizer], theirs: Callable[..., torch.optim.Optimizer], decay: Decay
) -> None:
    optimizer = ours(decay)
    rows, state = start(optimizer)
    plain = torch.nn.Parameter(rows.clone())
    dense = theirs([plain], {key: value for key, value in decay.items() if not decay.get("decoupled_weight_decay")})
    index = torch.arange(ROWS)
    for step in range(1, 6):
        if decay.get("decoupled_weight_decay"):
            with torch.no_grad():
                plain.mul_(1 - 0.2 * 0.3)  # as torch.optim.AdamW does before its step
        plain.grad = gradients(step, index)
        dense.step()
        update(optimizer, (rows, state), index, gradients(step, index), step)
        torch.testing.assert_close(rows, plain.detach(), rtol=0, atol=1e-12)
    torch_state = dense.state[plain]
    columns = state_columns(optimizer.name, DIM)
    for part, (name, width) in zip(state.split(list(columns.values()), dim=1), columns.items(), strict=True):
        torch.testing.assert_close(part, torch_state[name].expand(ROWS, width), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 5, 33])
@pytest.mark.parametrize("optimizer", ALL, ids=lambda optimizer: optimizer.name)
def test_a_row_does_not_depend_on_its_position(
    monkeypatch: pytest.MonkeyPatch, optimizer: RowOptimizer, dim: int, dtype: torch.dtype
) -> None:
    """Replicas are in other slots than their home row, and are updated with other rows, in blocks of any size."""
    for name in ("_BLOCK_NUMBERS", "_ADDED_BLOCK_NUMBERS"):
        monkeypatch.setattr(f"flexd.embedding.row_optimizers.{name}", 2 * dim)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    together, alone = start(optimizer, dtype, dim), start(optimizer, dtype, dim)
    for step in range(1, 3):
        grads = gradients(step, torch.arange(ROWS), dim).to(dtype)
        unchanged = grads.clone()
        update(optimizer, together, torch.arange(ROWS), grads, step)
        assert torch.equal(grads, unchanged), "gradients are not changed"
        for row in range(ROWS):
            update(optimizer, alone, torch.tensor([row]), grads[row : row + 1], step)
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[1], alone[1])


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(-0.1),
        lambda: SGD(float("nan")),
        lambda: Adagrad(eps=-1.0),
        lambda: RowWiseAdagrad(initial_accumulator_value=-1.0),
        lambda: Adam(betas=(0.9, 1.0)),
        lambda: RowWiseAdam(betas=(-0.1, 0.9)),
        lambda: Adam(weight_decay=-1.0),
    ],
)
def test_settings_out_of_range_are_refused(make: Callable[[], RowOptimizer]) -> None:
    with pytest.raises(EmbeddingError, match=r"at least 0|two numbers"):
        make()


@pytest.mark.parametrize("optimizer", [SGD(), Adagrad(), RowWiseAdagrad(weight_decay=0.1), Adam(), RowWiseAdam()])
@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.float32, torch.float64, torch.bfloat16)])
def test_parts_of_dim_groups_are_updated_bit_for_bit_as_each_alone(
    optimizer: Any, host: bool, dtypes: tuple[torch.dtype, ...]
) -> None:
    torch.manual_seed(0)
    groups, expected = [], []
    for dim, dtype, sizes in zip((7, 64, 3), dtypes, ((5, 1, 0, 20), (11,), (0, 30)), strict=True):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        columns = sum(state_columns(optimizer.name, dim).values())
        rows, state = torch.randn(30, dim).to(dtype), torch.rand(30, columns, dtype=wide)
        index = torch.split(torch.randperm(30)[: sum(sizes)], sizes)
        parts = [(at, torch.randn(len(at), dim, dtype=wide)) for at in index]
        groups.append(GroupUpdate(rows, state, parts, lambda slots: slots * 5))
        expected.append((rows.clone(), state.clone()))
        for at, grads in parts:
            update(optimizer, expected[-1], at, grads, 3)
    groups.append(GroupUpdate(torch.zeros(1, 2), torch.zeros(1, 1), []))
    with mock.patch.object(devices, "in_host_memory", return_value=host):
        optimizer.update_groups(groups, 3)
    for group, (rows, state) in zip(groups, expected, strict=False):
        assert torch.equal(group.rows, rows)
        assert torch.equal(group.state, state)
