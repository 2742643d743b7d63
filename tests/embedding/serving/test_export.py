"""Tables for serving: blocks, int8 rows with their error bound, and modules through ``torch.export``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import flexd
from flexd.core.layout import RankLayout
from flexd.embedding.serving.serving_table import quantize_rows
from tests.support import serving_jobs
from tests.support.plain_tables import pair
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize(("optimizer", "more"), [("adam", {}), ("sgd", {"fast_memory_bytes": 2_000})])
def test_blocks_and_exports_are_the_tables(ranks: Ranks, optimizer: str, more: dict[str, Any]) -> None:
    for rank, result in enumerate(ranks(4).run(serving_jobs.export, RankLayout(2, 2), optimizer, more)):
        for table in result.values():
            whole = table["whole"]
            np.testing.assert_array_equal(table["blocks"], whole)
            assert table["largest"] == min(5, len(whole))
            if rank == 1:
                np.testing.assert_array_equal(table["kept"], whole)
            bound = np.abs(whole).max(axis=1, keepdims=True) / 254 * (1 + 1e-5)
            found = table["numbers"] * table["scales"].astype(np.float64)[:, None]
            assert (np.abs(found - whole) <= bound).all()
            assert (table["numbers"] != 0).any(axis=1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_zeros_and_of_every_size_keep_the_bound(dtype: torch.dtype) -> None:
    rows = torch.randn(200, 9, generator=torch.Generator().manual_seed(1)).mul(torch.logspace(-4, 4, 200)[:, None])
    rows[17] = 0
    given = rows.to(dtype)
    numbers, scales = quantize_rows(given)
    found, exact = numbers.double() * scales.double()[:, None], given.double()
    assert torch.equal(found[17], torch.zeros(9, dtype=torch.float64))
    assert ((found - exact).abs() <= exact.abs().amax(1, keepdim=True) / 254 * (1 + 1e-5)).all()
    assert (numbers.abs().amax(1)[torch.arange(200) != 17] == 127).all()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("pooling", [None, "sum", "mean"])
def test_torch_export_takes_a_table(pooling: str | None, int8: bool) -> None:
    collection, _ = pair()
    table = flexd.export_table(collection, "item", int8=int8, pooling=pooling)
    assert table is not None
    assert not table.training
    assert not list(table.parameters())
    count = torch.export.Dim("count", min=2)
    if pooling is None:
        program = torch.export.export(table, (torch.tensor([[1, 2], [3, 0], [5, 5]]),), dynamic_shapes=({0: count},))
        given: tuple[torch.Tensor, ...] = (torch.tensor([[7, 2], [3, 9], [5, 5], [0, 1], [19, 4]]),)
    else:
        example = (torch.tensor([1, 2, 3, 0, 5]), torch.tensor([0, 2, 2]))
        bags = torch.export.Dim("bags", min=2)
        program = torch.export.export(table, example, dynamic_shapes=({0: count}, {0: bags}))
        given = (torch.tensor([7, 2, 3, 9, 5, 5, 0]), torch.tensor([0, 3, 3, 4]))
    found = program.module()(*given)
    assert torch.equal(found, table(*given))
    whole = collection.gather_table("item")
    wanted = (
        functional.embedding(given[0], whole)
        if pooling is None
        else functional.embedding_bag(given[0], whole, given[1], mode=pooling)
    )
    assert found.dtype == (torch.float32 if int8 else whole.dtype)
    bound = 3 * whole.abs().max().item() / 254 if int8 else 1e-12
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=bound)
