"""TorchRec's table configurations: data types, initial values, unsupported properties."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingConfig,
)
from torchrec.types import DataType

from flexd.core.errors import EmbeddingError
from flexd.core.placement import RankLayout
from flexd.torchrec import (
    FlexEmbeddingCollection,
)
from tests.support.rank_pool import RankPool
from tests.support.torchrec_jobs import ROWS, make


def initial(rank: int, layout: RankLayout) -> dict[str, torch.Tensor]:
    collection = make(False, layout)
    return {name: collection.gather_table(name) for name in ROWS}


ONE = RankLayout(1, 1)


def one(**more: Any) -> list[EmbeddingConfig]:
    return [EmbeddingConfig(**({"name": "t", "num_embeddings": 4000, "embedding_dim": 8} | more))]


def test_initial_values_follow_init_fn_and_seed() -> None:
    uniform = FlexEmbeddingCollection(one(weight_init_min=-0.1, weight_init_max=0.1)).gather_table("t")
    assert 0.099 < uniform.abs().max() <= 0.1
    positive = FlexEmbeddingCollection(one(weight_init_min=0.2, weight_init_max=0.3)).gather_table("t")
    assert positive.min() >= 0.2
    assert positive.max() <= 0.3
    normal = FlexEmbeddingCollection(one(init_fn=partial(nn.init.normal_, std=3.0))).gather_table("t")
    assert 2.9 < normal.std() < 3.1
    assert torch.equal(
        normal, FlexEmbeddingCollection(one(init_fn=partial(nn.init.normal_, std=3.0))).gather_table("t")
    )
    other = FlexEmbeddingCollection(one(init_fn=partial(nn.init.normal_, std=3.0)), seed=1)
    assert not torch.equal(normal, other.gather_table("t"))
    values = torch.randn(4000, 8)
    copied = FlexEmbeddingCollection(one(init_fn=lambda weight: weight.copy_(values)))
    assert torch.equal(copied.gather_table("t"), values)
    state = torch.random.get_rng_state()
    FlexEmbeddingCollection(one(init_fn=nn.init.xavier_uniform_))
    assert torch.equal(state, torch.random.get_rng_state()), "the trainer's random state is unchanged"


def test_initial_values_do_not_depend_on_the_number_of_ranks(pair: RankPool) -> None:
    alone = make(False, ONE)
    for tables in pair.run(initial, RankLayout(2, 1)):
        for name, table in tables.items():
            assert torch.equal(table, alone.gather_table(name))


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"data_type": DataType.INT8}, "one of FP32, FP16, BF16"),
        ({"need_pos": True}, "need_pos=True"),
        ({"num_embeddings_post_pruning": 10}, "num_embeddings_post_pruning=10"),
        ({"use_virtual_table": True}, "use_virtual_table"),
        (
            {"num_embeddings": 10**8, "init_fn": nn.init.xavier_normal_},
            "3,200,000,000 bytes of the table on every rank",
        ),
    ],
)
def test_unsupported_properties_are_refused(wrong: dict[str, Any], cause: str) -> None:
    with pytest.raises(EmbeddingError, match=cause):
        FlexEmbeddingCollection(one(**wrong))
