"""``flexd.torchrec.replace``: all collections of a model in place, as one collection, with equal training."""

from functools import partial
from typing import Any

import pytest
import torch
import torchrec
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagConfig, EmbeddingConfig
from torchrec.types import DataType

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.placement import RankLayout
from flexd.torchrec import FlexEmbeddingCollection, replace
from tests.support.rank_pool import RankPool
from tests.support.torchrec_models import OPTIMIZERS, ROWS, batch, collections, every_second_row, make, plain_tables


def train_alone(world_size: int, optimizer: str, steps: int) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Train the unchanged model in one process on the batches of all ranks, with torch's own optimizers."""
    model = make()
    kind, settings = OPTIMIZERS[optimizer]
    sparse = [p for module in collections(model) for p in module.parameters()]
    known = {id(parameter) for parameter in sparse}
    optimizers = [
        torch.optim.SGD([p for p in model.parameters() if id(p) not in known], lr=0.1),
        kind(sparse, **{"eps": 1e-8, **settings} if optimizer != "sgd" else settings),
    ]
    losses: list[list[float]] = [[] for _ in range(world_size)]
    for step in range(steps):
        for one in optimizers:
            one.zero_grad()
        for rank in range(world_size):
            loss = model(*batch(step, rank))
            (loss / world_size).backward()
            losses[rank].append(float(loss.detach()))
        for one in optimizers:
            one.step()
    return losses, plain_tables(model)


def train_replaced(
    rank: int,
    layout: RankLayout,
    optimizer: str,
    steps: int,
    prefetched: bool,
    one_lookup: bool,
    summed: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Replace the collections of the model, and train it on ranks; the tables ``summed`` be pooled at the owner."""
    model = make(optimizer)
    tables = replace(
        model,
        layout=layout,
        one_lookup=one_lookup,
        replica_slots=[80, 40],
        pooling_at=dict.fromkeys(summed, "owner"),
    )
    parallel: Any = DistributedDataParallel(model) if layout.world_size > 1 else model
    dense = torch.optim.SGD(parallel.parameters(), lr=0.1)
    losses, equal = [], True
    batches: Any = [batch(step, rank) for step in range(steps)]
    for given in flexd.prefetch(batches, tables, features=lambda one: one[1]) if prefetched else batches:
        if len(losses) == 1:
            tables.engine.inbox.offer(1, every_second_row())
        loss = parallel(*given)
        dense.zero_grad()
        tables.optimizer.zero_grad()
        loss.backward()
        dense.step()
        tables.optimizer.step()
        losses.append(float(loss.detach()))
        equal &= prefetched or tables.replicas_bit_equal()
    return {
        "losses": losses,
        "replicas_equal": equal and tables.replicas_bit_equal(),
        "version": tables.placement_version,
        "listed": len(tables.engine.migrator.placement()[0]),
        "tables": {name: tables.gather_table(name) for name in ROWS},
        "unused": tables.engine.unused_batches,
    }


STEPS = 6


@pytest.mark.parametrize(
    ("optimizer", "prefetched", "one_lookup", "summed"),
    [
        ("sgd", False, True, ()),
        ("rowwise_adagrad", False, False, ()),
        ("adagrad", True, True, ("tag", "shop")),
        ("sgd", False, False, ("user", "tag")),
    ],
)
def test_training_on_two_ranks_equals_the_model_before(
    pair: RankPool, optimizer: str, prefetched: bool, one_lookup: bool, summed: tuple[str, ...]
) -> None:
    losses, tables = train_alone(2, optimizer, STEPS)
    results = pair.run(train_replaced, RankLayout(2, 1), optimizer, STEPS, prefetched, one_lookup, summed)
    for rank, result in enumerate(results):
        assert result["losses"] == pytest.approx(losses[rank], abs=2e-6)
        for name, table in tables.items():
            torch.testing.assert_close(result["tables"][name], table, rtol=1e-5, atol=1e-6)
        assert result["replicas_equal"]
        assert (result["version"], result["unused"]) == (1, 0)
        assert result["listed"] == 86


def test_names_values_and_modes_stay() -> None:
    model = make("adagrad")
    before = plain_tables(model)
    tables = replace(model.eval(), replica_slots=[80, 40])
    assert {name: tuple(tables.gather_table(name).shape) for name in ROWS} == {
        name: tuple(table.shape) for name, table in before.items()
    }
    for name, table in before.items():
        assert torch.equal(tables.gather_table(name), table)
    assert [(module.path, module.table_names) for module in tables.replaced] == [
        ("sparse.embedding_bag_collection", ("user", "shop")),
        ("tags", ("tag",)),
        ("items", ("item",)),
        ("words", ("word",)),
    ]
    assert [module.training for module in collections(model)] == [False] * 4
    assert list(tables(batch(0, 0)[1])) == ["sparse.embedding_bag_collection", "tags", "items", "words"]
    assert {table.optimizer for table in tables.keyspace.tables} == {"adagrad"}
    assert tables.optimizer.param_groups[0]["lr"] == 0.05
    assert tables.optimizer.param_groups[0]["eps"] == 1e-8, "FBGEMM's default, not torch's"
    assert model.items.embedding_names_by_table() == [["history", "clicked"]]
    assert (model.items.embedding_dim(), model.words.need_indices(), model.tags.is_weighted()) == (8, True, True)
    assert [config.name for config in model.sparse.embedding_bag_collection.embedding_bag_configs()] == ["user", "shop"]
    with pytest.raises(EmbeddingError, match="tags was replaced: it has no embedding_bags"):
        _ = model.tags.embedding_bags


def test_the_models_state_dict_has_the_tables_once() -> None:
    model, other = make("sgd"), make("sgd")
    tables, others = replace(model, seed=1), replace(other, seed=1)
    others.load_rows("item", 0, torch.zeros(61, 8))
    state = model.state_dict()
    assert len([key for key in state if key.endswith("group0.rows")]) == 1
    other.load_state_dict(state)
    assert torch.equal(others.gather_table("item"), tables.gather_table("item"))
    with tables.left_out_of_state_dict():
        assert not [key for key in model.state_dict() if "tables" in key]


def test_a_module_that_is_not_called_with_the_same_input_is_named() -> None:
    model = make()
    replace(model)
    model.items(batch(0, 0)[1])
    with pytest.raises(EmbeddingError, match=r"items is called with another input while sparse.*, tags, words did not"):
        model.items(batch(1, 0)[1])
    model.items(batch(1, 0)[1])
    apart = make()
    replace(apart, one_lookup=False)
    for step in range(2):
        apart.items(batch(step, 0)[1])


def test_rows_that_modules_share_are_not_looked_up_again_by_a_recomputation() -> None:
    """The rows of the second look-up have other places than those of the first, whose gradients are added."""
    model = make()
    replace(model)
    features = batch(0, 0)[1]
    model.items(features), model.sparse(features), model.words(features)
    pooled = checkpoint(lambda: model.tags(features).values().tanh(), use_reentrant=False)
    with pytest.raises(EmbeddingError, match=r"tags is called again by a backward pass \(activation checkpointing"):
        pooled.sum().backward()


class Two(nn.Module):
    """Two collections whose tables have one name, and a module in two places."""

    def __init__(self, device: str = "cpu", **more: Any) -> None:
        super().__init__()
        config = {"name": "t", "num_embeddings": 300, "embedding_dim": 4, "feature_names": ["f"], **more}
        self.pooled = torchrec.EmbeddingBagCollection([EmbeddingBagConfig(**config)], device=torch.device(device))
        self.rows = torchrec.EmbeddingCollection([EmbeddingConfig(**config)], device=torch.device(device))
        self.again = self.rows


def test_modules_on_meta_get_the_values_of_their_configurations() -> None:
    init_fn = partial(nn.init.normal_, std=2.0)
    tables = replace(Two("meta", init_fn=init_fn), seed=4)
    alone = FlexEmbeddingCollection(
        [EmbeddingConfig(name="t", num_embeddings=300, embedding_dim=4, init_fn=init_fn)], seed=4
    )
    assert torch.equal(tables.gather_table("t"), alone.gather_table("t"))
    assert 1.8 < tables.gather_table("rows/t").std() < 2.2
    loaded = tables.gather_table("rows/t")
    tables.load_rows("rows/t", 0, torch.zeros(300, 4))
    tables.reset_parameters()
    assert torch.equal(tables.gather_table("rows/t"), loaded)


def refused(change: Any) -> Two:
    model = Two()
    change(model)
    return model


def apply(kind: Any, settings: dict[str, Any], *names: str) -> Any:
    def change(model: Two) -> None:
        for name in names or ("pooled", "rows"):
            apply_optimizer_in_backward(kind, getattr(model, name).parameters(), settings)

    return change


def apply_both(model: Two) -> None:
    for eps, name in ((1, "rows"), (2, "pooled")):
        apply(torch.optim.Adagrad, {"lr": 0.1, "eps": eps}, name)(model)


class Own(torchrec.EmbeddingCollection):  # type: ignore[misc]
    pass


def own(model: Two) -> None:
    model.rows = Own([EmbeddingConfig(name="t", num_embeddings=3, embedding_dim=2)])


def int8(model: Two) -> None:
    model.rows = torchrec.EmbeddingCollection(
        [EmbeddingConfig(name="t", num_embeddings=3, embedding_dim=2, data_type=DataType.INT8)]
    )


def weighted_mean(model: Two) -> None:
    config = EmbeddingBagConfig(
        name="t", num_embeddings=3, embedding_dim=2, feature_names=["f"], pooling=torchrec.PoolingType.MEAN
    )
    model.pooled = torchrec.EmbeddingBagCollection([config], is_weighted=True)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (own, r"rows is a tests.*Own, which is not replaced"),
        (int8, "'t': data_type INT8"),
        (weighted_mean, "pooled is weighted and has tables pooled by MEAN: t"),
        (lambda model: model.double(), "pooled, table 't': its weight is .* torch.float64"),
        (apply(torch.optim.RMSprop, {"lr": 0.1}), "table 't': optimizer torch.optim.rmsprop.RMSprop"),
        (apply(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), "table 't': its optimizer has momentum=0.9"),
        (apply_both, "'t' and 'rows/t' have different settings: Adagrad.*eps=2.* and Adagrad.*eps=1"),
    ],
)
def test_what_cannot_be_replaced_is_refused_by_name_and_the_model_is_unchanged(change: Any, cause: str) -> None:
    model = refused(change)
    before = dict(model.named_modules())
    with pytest.raises(EmbeddingError, match=cause):
        replace(model)
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (torch.optim.SGD, {"lr": 0.3, "momentum": 0.0}, flexd.SGD(0.3)),
        (torch.optim.Adagrad, {"lr": 0.3}, flexd.Adagrad(0.3, eps=1e-8)),
        (torchrec.optim.RowWiseAdagrad, {"lr": 0.3, "eps": 0.5}, flexd.RowWiseAdagrad(0.3, eps=0.5)),
        (torch.optim.Adam, {"lr": 0.3, "betas": (0.1, 0.2)}, flexd.Adam(0.3, betas=(0.1, 0.2))),
        (torchrec.optim.PartialRowWiseAdam, {"beta2": 0.5}, flexd.RowWiseAdam(0.01, betas=(0.9, 0.5))),
    ],
)
def test_the_attached_optimizer_is_taken_over(kind: Any, settings: dict[str, Any], expected: Any) -> None:
    model = Two("meta")
    for parameter in model.parameters():
        parameter._optimizer_classes, parameter._optimizer_kwargs = [kind], [settings]
    assert replace(model).optimizer._current() == expected
    assert replace(Two()).optimizer._current() == flexd.SGD(0.01)
    attached = Two()
    apply(torch.optim.RMSprop, {"lr": 0.1})(attached)
    assert replace(attached, optimizer=flexd.Adam(0.2)).optimizer._current() == flexd.Adam(0.2)
