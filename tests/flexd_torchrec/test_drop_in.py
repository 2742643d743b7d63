"""``flexd.torchrec`` against TorchRec's own modules: outputs, training, names, weights, batch sizes by key."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.rank_pool import RankPool

torchrec = pytest.importorskip("torchrec")
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType  # noqa: E402
from torchrec.modules.embedding_modules import (  # noqa: E402
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)
from torchrec.types import DataType  # noqa: E402

from flexd.core.errors import EmbeddingError, FlexdError  # noqa: E402
from flexd.core.layout import RankLayout  # noqa: E402
from flexd.torchrec import FlexEmbeddingBagCollection, FlexEmbeddingCollection  # noqa: E402
from tests.support.torchrec_jobs import batch, configs, make, plain_of, train_alone  # noqa: E402

ONE = RankLayout(1, 1)


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("samples", [0, 1, 6])
def test_outputs_are_torchrecs(pooled: bool, samples: int) -> None:
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


@pytest.mark.parametrize("pooled", [False, True])
def test_training_on_two_ranks_equals_torchrec_on_one(pair: RankPool, pooled: bool) -> None:
    losses, tables = train_alone(2, pooled)
    for rank, result in enumerate(pair.run("torchrec_jobs:train", RankLayout(2, 1), pooled)):
        torch.testing.assert_close(torch.tensor(result["losses"]), torch.tensor(losses[rank]), rtol=1e-5, atol=1e-5)
        for name, table in tables.items():
            torch.testing.assert_close(result["tables"][name], table, rtol=1e-5, atol=1e-6)


def test_faulty_input_is_an_error_on_every_rank(pair: RankPool) -> None:
    causes = ["a Tensor instead of a KeyedJaggedTensor", "has no history, target", "2 values and 3 lengths", "row 99"]
    for rank, said in enumerate(pair.run("torchrec_jobs:refused", RankLayout(2, 1), 1)):
        for text, cause in zip(said, causes, strict=True):
            assert (cause if rank == 1 else "rank 1 was given input") in text


def test_they_are_what_torchrec_code_asks_for() -> None:
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


def test_need_indices() -> None:
    ours = FlexEmbeddingCollection(configs(False), None, True)
    kjt = batch(0, 0, samples=4)
    assert torch.equal(ours(kjt)["target@shop"].weights(), kjt["target"].values())


def test_weights() -> None:
    table = EmbeddingBagConfig(name="item", num_embeddings=61, embedding_dim=4, feature_names=["a", "b"])
    ours = FlexEmbeddingBagCollection([table], is_weighted=True)
    plain = torchrec.EmbeddingBagCollection(tables=[table], is_weighted=True)
    plain.embedding_bags["item"].weight.data.copy_(ours.gather_table("item"))
    given = {"keys": ["a", "b"], "values": torch.tensor([1, 2, 2, 60, 5]), "lengths": torch.tensor([2, 0, 1, 2])}
    kjt = KeyedJaggedTensor.from_lengths_sync(**given, weights=torch.tensor([0.5, -1.0, 2.0, 1.0, 3.0]))
    torch.testing.assert_close(ours(kjt).values(), plain(kjt).values())
    with pytest.raises(EmbeddingError, match="without a weight for each value"):
        ours(KeyedJaggedTensor.from_lengths_sync(**given))
    table.pooling = PoolingType.MEAN
    with pytest.raises(EmbeddingError, match=r"pooled by MEAN: item.*sum to 1"):
        FlexEmbeddingBagCollection([table], is_weighted=True)


def by_key(inverse: list[list[int]] | None, sizes: tuple[int, int] = (2, 3)) -> KeyedJaggedTensor:
    """Batch sizes of 2 and 3."""
    indices = None if inverse is None else (["a", "b"], torch.tensor(inverse))
    return KeyedJaggedTensor(
        keys=["a", "b"], values=torch.tensor([1, 2, 3, 4, 5, 6]), lengths=torch.tensor([1, 2, 0, 2, 1]),
        stride_per_key_per_rank=[[sizes[0]], [sizes[1]]], inverse_indices=indices,
    )  # fmt: skip


def test_batch_sizes_that_differ_by_key() -> None:
    names = {"name": "item", "num_embeddings": 20, "embedding_dim": 4, "feature_names": ["a", "b"]}
    sequences = FlexEmbeddingCollection([EmbeddingConfig(**names)])
    out = sequences(by_key(None))
    table = sequences.gather_table("item")
    assert torch.equal(out["a"].values(), table[[1, 2, 3]])
    assert [out[key].lengths().tolist() for key in ("a", "b")] == [[1, 2], [0, 2, 1]]

    bags = FlexEmbeddingBagCollection([EmbeddingBagConfig(**names)])
    plain = torchrec.EmbeddingBagCollection(tables=[EmbeddingBagConfig(**names)])
    plain.embedding_bags["item"].weight.data.copy_(bags.gather_table("item"))
    kjt = by_key([[0, 1, 1, 0], [2, 0, 1, 1]])
    torch.testing.assert_close(bags(kjt).values(), plain(kjt).values())
    with pytest.raises(EmbeddingError, match="batch sizes differ by feature"):
        bags(by_key(None))
    for bad in ([[0, 1, 2, 0], [2, 0, 1, 1]], [[0, 1, 1, 0], [2, 0, 1, -1]]):
        with pytest.raises(EmbeddingError, match="inverse_indices are missing or outside"):
            bags(by_key(bad))


def test_tensor_dict_input() -> None:
    tensordict = pytest.importorskip("tensordict")
    ids = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
    ours = FlexEmbeddingCollection([EmbeddingConfig(name="t", num_embeddings=5, embedding_dim=2, feature_names=["f"])])
    out = ours(tensordict.TensorDict({"f": ids}, batch_size=[2]))["f"]
    assert torch.equal(out.values(), ours.gather_table("t")[[1, 2, 3]])
    assert out.lengths().tolist() == [2, 1]


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_data_types_come_out_as_float32(data_type: DataType) -> None:
    ours = FlexEmbeddingCollection(
        [EmbeddingConfig(name="t", num_embeddings=5, embedding_dim=2, feature_names=["f"], data_type=data_type)]
    )
    out = ours(KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, 4]), torch.tensor([2])))["f"]
    assert out.values().dtype == torch.float32
    assert ours.gather_table("t").dtype == {DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}[data_type]
    before = ours.gather_table("t")
    out.values().sum().backward()
    ours.optimizer.step()
    assert [bool((before[row] != ours.gather_table("t")[row]).all()) for row in range(5)] == [
        False, True, False, False, True,
    ]  # fmt: skip


def one(**more: Any) -> list[EmbeddingConfig]:
    return [EmbeddingConfig(**({"name": "t", "num_embeddings": 4000, "embedding_dim": 8} | more))]


def test_initial_values() -> None:
    uniform = FlexEmbeddingCollection(one(weight_init_min=-0.1, weight_init_max=0.1)).gather_table("t")
    assert 0.099 < uniform.abs().max() <= 0.1
    lopsided = FlexEmbeddingCollection(one(weight_init_min=0.2, weight_init_max=0.3)).gather_table("t")
    assert lopsided.min() >= 0.2
    assert lopsided.max() <= 0.3
    normal = FlexEmbeddingCollection(one(init_fn=partial(nn.init.normal_, std=3.0))).gather_table("t")
    assert 2.9 < normal.std() < 3.1
    assert torch.equal(
        normal, FlexEmbeddingCollection(one(init_fn=partial(nn.init.normal_, std=3.0))).gather_table("t")
    )
    other = FlexEmbeddingCollection(one(init_fn=partial(nn.init.normal_, std=3.0)), seed=1)
    assert not torch.equal(normal, other.gather_table("t"))
    given = torch.randn(4000, 8)
    copied = FlexEmbeddingCollection(one(init_fn=lambda weight: weight.copy_(given)))
    assert torch.equal(copied.gather_table("t"), given)
    state = torch.random.get_rng_state()
    FlexEmbeddingCollection(one(init_fn=nn.init.xavier_uniform_))
    assert torch.equal(state, torch.random.get_rng_state()), "the trainer's random numbers are its own"


def test_initial_values_do_not_depend_on_the_number_of_ranks(pair: RankPool) -> None:
    alone = make(False, ONE)
    for tables in pair.run("torchrec_jobs:initial", RankLayout(2, 1)):
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
def test_what_cannot_be_honoured_is_refused(wrong: dict[str, Any], cause: str) -> None:
    with pytest.raises(EmbeddingError, match=cause):
        FlexEmbeddingCollection(one(**wrong))


def test_tables_of_several_dims_are_for_bags() -> None:
    two = [*one(), *one(name="u", embedding_dim=4)]
    with pytest.raises(EmbeddingError, match=r"tables of dims \[4, 8\]"):
        FlexEmbeddingCollection(two)


def test_without_torchrec_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchrec" or "flexd.torchrec" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchrec", None)
    with pytest.raises(ImportError, match=r"pip install 'flexd\[torchrec\]'") as caught:
        importlib.import_module("flexd.torchrec")
    assert isinstance(caught.value, FlexdError)
