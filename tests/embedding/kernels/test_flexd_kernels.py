"""The measured phases compute what a step computes: sums of bags, and the update of the rows by their gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flexd.core.errors import TopologyError
from flexd.embedding.kernels.flexd_kernels import FlexdKernels, RowMemory, bag_offsets
from flexd.embedding.row_optimizers import RowWiseAdagrad
from flexd.topology.kernel_design import drawn_ids
from flexd.topology.kernel_file import TableSet

TABLES = TableSet(
    "float32",
    *(np.array(v, float) for v in ([40, 30, 20], [8, 4, 8], [50, 20, 33], [10, 10, 10], [1, 0, 0.5], [0, 0, 0])),
)


def test_phases_sum_bags_and_update_their_rows() -> None:
    kernels = FlexdKernels(2**16, torch.device("cpu"))
    ids = drawn_ids(TABLES, np.random.default_rng(0))
    groups = kernels._groups(TABLES, ids)
    assert [tuple(group.rows.shape) for group in groups] == [(30, 4), (60, 8)]
    group = groups[1]
    group.rows.normal_()
    group.grads.normal_()
    group.look_up()
    keys = torch.from_numpy(np.concatenate([ids[0], ids[2] + 40]))
    offsets = torch.from_numpy(bag_offsets(TABLES, np.array([0, 2])))
    weight = group.rows.clone().requires_grad_()
    wanted = torch.nn.functional.embedding_bag(keys, weight, offsets, mode="sum", include_last_offset=True)
    torch.testing.assert_close(group.pool(), wanted.detach())
    wanted.backward(group.grads)
    expected, state = weight.detach().clone(), torch.zeros(60, 1)
    optimizer, slots = RowWiseAdagrad(lr=0.01), group.slots
    optimizer.update(expected, state, slots, weight.grad[slots], 1)
    kernels._optimizer.update_groups([group.update_of()], 1)
    torch.testing.assert_close(group.rows, expected)
    torch.testing.assert_close(group.state, state)
    assert not torch.equal(expected, weight.detach())


def test_a_step_leaves_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one set are those of the next under another dtype: whatever is written must be zero."""
    kernels = FlexdKernels(2**16, torch.device("cpu"))
    for dtype in ("float16", "float32", "bfloat16"):
        tables = TableSet(dtype, *(getattr(TABLES, n) for n in ("rows", "dim", "ids", "bags", "skew", "distinct")))
        for phase in kernels.phases(tables, drawn_ids(tables, np.random.default_rng(1))):
            phase()
    assert not kernels._rows.bytes.any()
    assert not kernels._state.bytes.any()


def test_bags_share_the_ids_of_a_table() -> None:
    assert np.diff(bag_offsets(TABLES, np.array([0, 2]))).tolist() == [5] * 10 + [3, 3, 3, 4, 3, 3, 4, 3, 3, 4]


def test_tables_beyond_the_memory_are_refused() -> None:
    memory = RowMemory(1000, torch.device("cpu"))
    assert [t.shape for t in memory.tensors([(3, 4), (7, 8)], torch.float32)] == [(3, 4), (7, 8)]
    with pytest.raises(TopologyError, match="measure smaller sets"):
        memory.tensors([(1000, 8)], torch.float32)
