"""``FlexEmbeddingCollection`` and its pooled twin against TorchRec's own modules: outputs, names, inputs, weights,
configurations."""

import importlib
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torchrec
from torch import nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)
from torchrec.types import DataType

import flexd
from flexd.core.errors import EmbeddingError, FlexdError
from flexd.core.placement import RankLayout
from flexd.torchrec import (
    FlexEmbeddingBagCollection,
    FlexEmbeddingCollection,
)
from tests.support.rank_pool import RankPool, error_of

ROWS = {"item": 61, "shop": 17}
KEYS = ["shop", "ignored", "history", "target"]


def configs(pooled: bool) -> list[Any]:
    kind = EmbeddingBagConfig if pooled else EmbeddingConfig
    more: list[dict[str, Any]] = [{}, {"pooling": torchrec.PoolingType.MEAN}] if pooled else [{}, {}]
    dims = (8, 4) if pooled else (8, 8)
    return [
        kind(
            name="item", num_embeddings=61, embedding_dim=dims[0], feature_names=["history", "target"],
            weight_init_min=-0.5, weight_init_max=0.5, **more[0],
        ),
        kind(
            name="shop", num_embeddings=17, embedding_dim=dims[1], feature_names=["shop", "target"],
            init_fn=torch.nn.init.normal_, **more[1],
        ),
    ]  # fmt: skip


def batch(step: int, rank: int, samples: int | None = None) -> KeyedJaggedTensor:
    rng = np.random.default_rng([5, step, rank])
    samples = int(rng.integers(1, 5)) if samples is None else samples
    lengths = rng.integers(0, 6, size=(len(KEYS), samples))
    values = [(rng.zipf(1.3, count) - 1) % 17 for count in lengths.sum(axis=1)]
    return KeyedJaggedTensor.from_lengths_sync(
        keys=KEYS, values=torch.from_numpy(np.concatenate(values)), lengths=torch.from_numpy(lengths.reshape(-1))
    )


def loss_of(out: Any) -> torch.Tensor:
    parts = [jagged.values() for jagged in out.values()] if isinstance(out, dict) else [out.values()]
    return torch.stack([part.sin().sum() + part.square().sum() for part in parts]).sum()


def make(pooled: bool, layout: RankLayout) -> Any:
    module = FlexEmbeddingBagCollection if pooled else FlexEmbeddingCollection
    return module(configs(pooled), optimizer=flexd.SGD(0.1), layout=layout, replica_slots=[20] * (1 + pooled))


def plain_of(collection: Any, pooled: bool) -> Any:
    module = (torchrec.EmbeddingBagCollection if pooled else torchrec.EmbeddingCollection)(tables=configs(pooled))
    tables = module.embedding_bags if pooled else module.embeddings
    with torch.no_grad():
        for name, table in tables.items():
            table.weight.copy_(collection.gather_table(name))
    return module


ONE = RankLayout(1, 1)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("samples", [0, 1, 6])
def test_outputs_equal_those_of_torchrec(pooled: bool, samples: int) -> None:
    ours = make(pooled, ONE)
    plain = plain_of(ours, pooled)
    kjt = batch(0, 0, samples=samples)
    if samples == 0:  # TorchRec cannot split an empty batch
        empty = ours(kjt)
        assert (empty.values().shape[0] if pooled else sum(j.values().numel() for j in empty.values())) == 0
        return
    got, expected = ours(kjt), plain(kjt)
    if pooled:
        assert isinstance(got, torchrec.KeyedTensor)
        assert got.keys() == expected.keys() == ["history", "target@item", "shop", "target@shop"]
        assert got.length_per_key() == expected.length_per_key()
        torch.testing.assert_close(got.values(), expected.values())
        return
    assert list(got) == list(expected) == ["history", "target@item", "shop", "target@shop"]
    for name, jagged in expected.items():
        assert isinstance(got[name], torchrec.JaggedTensor)
        assert torch.equal(got[name].values(), jagged.values())
        assert torch.equal(got[name].lengths(), jagged.lengths())
        assert torch.equal(got[name].offsets(), jagged.offsets())
        assert got[name].weights_or_none() is None


def test_collections_implement_the_interfaces_of_torchrec() -> None:
    sequences, bags = make(False, ONE), make(True, ONE)
    assert isinstance(sequences, EmbeddingCollectionInterface)
    assert isinstance(bags, EmbeddingBagCollectionInterface)
    plain = torchrec.EmbeddingCollection(tables=configs(False))
    assert sequences.embedding_dim() == plain.embedding_dim() == 8
    assert sequences.embedding_names_by_table() == plain.embedding_names_by_table()
    assert [config.name for config in sequences.embedding_configs()] == ["item", "shop"]
    assert (sequences.need_indices(), bags.is_weighted()) == (False, False)
    assert sequences.device == plain.device
    unnamed = EmbeddingConfig(name="t", num_embeddings=3, embedding_dim=2)
    assert FlexEmbeddingCollection([unnamed]).embedding_names_by_table() == [["t"]]
    assert unnamed.feature_names == [], "a configuration is not changed"


def test_without_torchrec_the_import_error_names_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchrec" or "flexd.torchrec" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchrec", None)
    with pytest.raises(ImportError, match=r"pip install 'flexd\[torchrec\]'") as caught:
        importlib.import_module("flexd.torchrec")
    assert isinstance(caught.value, FlexdError)


@pytest.mark.parametrize("pooling_at", ["requester", "owner"])
def test_weights_are_factors_of_the_rows(pooling_at: str) -> None:
    table = EmbeddingBagConfig(name="item", num_embeddings=61, embedding_dim=4, feature_names=["a", "b"])
    ours = FlexEmbeddingBagCollection([table], is_weighted=True, pooling_at={"item": pooling_at})
    plain = torchrec.EmbeddingBagCollection(tables=[table], is_weighted=True)
    plain.embedding_bags["item"].weight.data.copy_(ours.gather_table("item"))
    inputs = {"keys": ["a", "b"], "values": torch.tensor([1, 2, 2, 60, 5]), "lengths": torch.tensor([2, 0, 1, 2])}
    kjt = KeyedJaggedTensor.from_lengths_sync(**inputs, weights=torch.tensor([0.5, -1.0, 2.0, 1.0, 3.0]))
    torch.testing.assert_close(ours(kjt).values(), plain(kjt).values())
    with pytest.raises(EmbeddingError, match="without a weight for each value"):
        ours(KeyedJaggedTensor.from_lengths_sync(**inputs))
    table.pooling = PoolingType.MEAN
    with pytest.raises(EmbeddingError, match=r"pooled by MEAN: item.*sum to 1"):
        FlexEmbeddingBagCollection([table], is_weighted=True)


def refused(rank: int, layout: RankLayout, faulty: int) -> list[str]:
    """Give one rank faulty input and return the error of every rank."""
    collection = make(False, layout)
    good = batch(1, rank, samples=3)
    some = torch.tensor([1, 2])
    faults = [
        torch.tensor([1, 2]),
        KeyedJaggedTensor.from_lengths_sync(["shop"], torch.tensor([1, 2]), torch.tensor([2])),
        KeyedJaggedTensor(["shop", "history", "target"], some, lengths=torch.tensor([1, 1, 1])),
        KeyedJaggedTensor.from_lengths_sync(
            ["shop", "history", "target"], torch.tensor([99, 1, 1]), torch.tensor([1, 1, 1])
        ),
    ]
    errors = []
    for fault in faults:
        errors.append(error_of(collection, fault if rank == faulty else good))
        loss_of(collection(good)).backward()
        collection.optimizer.step()
    return errors


def test_invalid_input_is_refused_on_every_rank(pair: RankPool) -> None:
    causes = ["a Tensor instead of a KeyedJaggedTensor", "has no history, target", "2 values and 3 lengths", "row 99"]
    for rank, errors in enumerate(pair.run(refused, RankLayout(2, 1), 1)):
        for text, cause in zip(errors, causes, strict=True):
            assert (cause if rank == 1 else "rank 1 has input") in text


def initial(rank: int, layout: RankLayout) -> dict[str, torch.Tensor]:
    collection = make(False, layout)
    return {name: collection.gather_table(name) for name in ROWS}


def one(**more: Any) -> list[EmbeddingConfig]:
    return [EmbeddingConfig(**({"name": "t", "num_embeddings": 4000, "embedding_dim": 8} | more))]


def test_initial_values_follow_init_fn_and_seed() -> None:
    uniform = FlexEmbeddingCollection(one(weight_init_min=-0.1, weight_init_max=0.1)).gather_table("t")
    assert 0.099 < uniform.abs().max() <= 0.1
    positive = FlexEmbeddingCollection(one(weight_init_min=0.2, weight_init_max=0.3)).gather_table("t")
    assert 0.2 <= positive.min() <= positive.max() <= 0.3
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
