"""``flexd.embed_all``: which modules are replaced, and which are refused. Training: test_embedding.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flexd
from flexd.core.errors import EmbeddingError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.items.weight


class Twice(nn.Module):
    """One module at two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(5, 3)
        self.inner = nn.ModuleDict({"products": self.items, "positions": nn.Embedding(4, 3)})


def frozen() -> nn.Module:
    return nn.Sequential(nn.Embedding.from_pretrained(torch.ones(5, 3)))


def on_meta() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 3, device="meta"))


def in_ddp() -> nn.Module:
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = nn.Sequential(nn.Embedding(5, 3))
    return wrapper


@pytest.mark.parametrize(
    ("make", "names", "text"),
    [
        (Tied, None, "items shares its weight with out.weight"),
        (frozen, None, "0 is frozen"),
        (on_meta, None, "modules on meta"),
        (in_ddp, None, "DistributedDataParallel"),
        (Twice, ["shop", "inner"], "no nn.Embedding at shop, inner - one of items, inner.products, inner.positions"),
        (lambda: nn.Sequential(nn.Linear(1, 1)), None, "no nn.Embedding - make"),
        (lambda: nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)), None, "0 has max_norm"),
        (lambda: nn.Sequential(nn.Embedding(5, 3, scale_grad_by_freq=True)), None, "0 has max_norm"),
    ],
)
def test_what_cannot_be_replaced_is_named(make: Callable[[], nn.Module], names: list[str] | None, text: str) -> None:
    model = make()
    before = dict(model.named_modules())
    with pytest.raises(EmbeddingError, match=text):
        flexd.embed_all(model, names=names)
    assert dict(model.named_modules()) == before


def test_a_module_at_two_paths_stays_one() -> None:
    model = Twice()
    values = model.items.weight.detach().clone()
    tables = flexd.embed_all(model, names=["items"])
    assert model.items is model.inner["products"]
    assert type(model.inner["positions"]) is nn.Embedding
    assert [table.name for table in tables.tables] == ["items"]
    assert torch.equal(model.items.weight.detach(), values)
