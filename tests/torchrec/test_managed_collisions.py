"""TorchRec models with managed collisions (ZCH) whose tables become flexd's of unbounded ids."""

from typing import Any
from unittest import mock

import pytest
import torch
import torchrec
from torch import nn
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from flexd.core.errors import CheckpointError, EmbeddingError
from flexd.core.placement import RankLayout
from flexd.torchrec import (
    FlexEmbeddingBagCollection,
    FlexEmbeddingCollection,
    FusedOptimizerState,
    ModelState,
    replace,
    restore,
)
from tests.support.rank_pool import RankPool

ROWS, DIM = 80, 4


class Model(nn.Module):
    """Users with managed collisions, pooled or not, and shops without."""

    def __init__(self, pooled: bool, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        kinds = {"name": "users", "num_embeddings": ROWS, "embedding_dim": DIM, "feature_names": ["user"]}
        config = (torchrec.EmbeddingBagConfig if pooled else torchrec.EmbeddingConfig)(**kinds)
        known = MCHManagedCollisionModule(
            zch_size=ROWS, device=torch.device("cpu"), eviction_interval=1,
            eviction_policy=DistanceLFU_EvictionPolicy(),
            **more.pop("known", {}),
        )  # fmt: skip
        managed = ManagedCollisionCollection({"users": known}, [config])
        if pooled:
            inside: Any = torchrec.EmbeddingBagCollection([config])
            self.users: Any = ManagedCollisionEmbeddingBagCollection(inside, managed, **more)
        else:
            inside = torchrec.EmbeddingCollection([config])
            self.users = ManagedCollisionEmbeddingCollection(inside, managed, **more)
        shops = torchrec.EmbeddingBagConfig(name="shops", num_embeddings=5, embedding_dim=DIM, feature_names=["shop"])
        self.shops = torchrec.EmbeddingBagCollection([shops])

    def forward(self, given: torchrec.KeyedJaggedTensor) -> torch.Tensor:
        users, remapped = self.users(given)
        assert remapped is None
        users = users.values() if isinstance(users, torchrec.KeyedTensor) else users["user"].values()
        return users.square().sum() + self.shops(given).values().sum()


def features(*ids: int) -> torchrec.KeyedJaggedTensor:
    return torchrec.KeyedJaggedTensor(
        keys=["user", "shop"], values=torch.tensor([*ids, 1]), lengths=torch.tensor([len(ids), 1])
    )


IDS = [7, 2**61, 3, 12_345_678_901]


def known_before(pooled: bool, **more: Any) -> tuple[Model, dict[int, torch.Tensor]]:
    """Return a model whose module has given rows to ids, and the row of each."""
    model = Model(pooled, **more)
    for _ in range(3):
        model(features(*IDS))
    known = model.users._managed_collision_collection._managed_collision_modules["users"]
    ids = known._mch_sorted_raw_ids
    used = (ids != 2**63 - 1).nonzero().view(-1).tolist()
    assert len(used) == len(IDS)
    inside = model.users._embedding_module
    weight = inside.embedding_bags["users"].weight if pooled else inside.embeddings["users"].weight
    rows = known._mch_remapped_ids_mapping
    return model, {int(ids[at]): weight[rows[at]].detach().clone() for at in used}


def moved(rank: int, layout: RankLayout, pooled: bool) -> list[str]:
    model, before = known_before(pooled)
    tables = replace(model, layout=layout)
    texts = [f"{type(model.users).__name__} {type(model.users._embedding_module).__name__}"]
    ids = torch.tensor(IDS)
    rows = tables.rows_of("users", ids)
    table = tables.gather_table("users")
    for id_, row in zip(IDS, rows.tolist(), strict=True):
        if not torch.equal(table[row], before.get(id_, torch.empty(0))):
            texts.append(f"id {id_} has another row")
    model(features(5, 7, 5)).backward()
    tables.optimizer.step()
    if not bool((tables.rows_of("users", torch.tensor([5, *IDS])) >= 0).all()):
        texts.append("an id has no row")
    return texts


@pytest.mark.parametrize("pooled", [False, True])
def test_known_ids_keep_their_rows_and_new_ones_get_some(pair: RankPool, pooled: bool) -> None:
    kind = f"Replaced{'EmbeddingBagCollection' if pooled else 'EmbeddingCollection'}"
    for texts in [moved(0, RankLayout(1, 1), pooled), *pair.run(moved, RankLayout(2, 1), pooled)]:
        assert texts == [f"ReplacedManagedCollisions {kind}"]


def restored(rank: int, layout: RankLayout, pooled: bool) -> list[str]:
    model, _ = known_before(pooled)
    tables = replace(model, layout=layout)
    model(features(5, 7, 5)).backward()
    tables.optimizer.step()
    again = Model(pooled)
    restore(again, tables)
    ids = [*IDS, 5, 999]
    texts = []
    for same in (again.train(), again.eval()):
        wanted, found = (float(each(features(*ids)).detach()) for each in (model.eval(), same))
        if abs(wanted - found) > 1e-6:
            texts.append(f"{found} for {wanted}")
    if sorted(again.state_dict()) != sorted(Model(pooled).state_dict()):
        texts.append("other names in the checkpoint")
    # As of a checkpoint of TorchRec.
    read = Model(pooled)
    read.load_state_dict(again.state_dict())
    back = replace(read, layout=layout)
    given = torch.tensor([*IDS, 5])
    if not torch.equal(back.gather_table("users")[back.rows_of("users", given)],
                       tables.gather_table("users")[tables.rows_of("users", given)]):  # fmt: skip
        texts.append("other rows")
    return texts


@pytest.mark.parametrize("pooled", [False, True])
def test_a_model_of_torchrec_gets_the_rows_and_their_ids_back(pair: RankPool, pooled: bool) -> None:
    for texts in [restored(0, RankLayout(1, 1), pooled), *pair.run(restored, RankLayout(2, 1), pooled)]:
        assert texts == []


def of_types(rank: int, layout: RankLayout) -> bool:
    bags = FlexEmbeddingBagCollection(
        [torchrec.EmbeddingBagConfig(name="users", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["user"])],
        unbounded={"users": 2}, layout=layout,
    )  # fmt: skip
    rows = FlexEmbeddingCollection(
        [torchrec.EmbeddingConfig(name="users", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["user"])],
        unbounded={"users": 1}, layout=layout,
    )  # fmt: skip
    for _ in range(2):
        for tables in (bags, rows):
            found = tables(features(-5, 2**62))
            found = found.values() if isinstance(found, torchrec.KeyedTensor) else found["user"].values()
            found.sum().backward()
            tables.optimizer.step()
    once = torch.tensor([-5, 2**62, 11])
    return all((tables.rows_of("users", once) >= 0).tolist() == [True, True, False] for tables in (bags, rows))


def test_flexds_own_types_take_unbounded_ids_too(pair: RankPool) -> None:
    assert pair.run(of_types, RankLayout(2, 1)) == [True, True]
    with pytest.raises(EmbeddingError, match="unbounded names shops - one of users"):
        FlexEmbeddingCollection(
            [torchrec.EmbeddingConfig(name="users", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["user"])],
            unbounded={"shops": 1}, layout=RankLayout(1, 1),
        )  # fmt: skip


def test_modules_that_cannot_know_the_ids_are_named() -> None:
    model = Model(False)
    tables = replace(model, layout=RankLayout(1, 1))
    for more, says in (({"input_hash_func": lambda ids, size: ids}, "an input_hash_func"), ({}, "has 81 rows")):
        other = Model(False, known=more)
        if not more:
            known = other.users._managed_collision_collection._managed_collision_modules["users"]
            known._zch_size = ROWS + 1
        with pytest.raises(EmbeddingError, match=says):
            restore(other, tables)
    other = Model(False)
    other.more = torchrec.EmbeddingCollection(
        [torchrec.EmbeddingConfig(name="more", num_embeddings=3, embedding_dim=2, feature_names=["m"])]
    )
    with pytest.raises(EmbeddingError, match=r"more: table 'more' has shape \(3, 2\)"):
        restore(other, tables)


def test_a_model_on_meta_has_no_ids_yet() -> None:
    with torch.device("meta"):
        model = Model(False)
    tables = replace(model, layout=RankLayout(1, 1))
    model(features(*IDS)).backward()
    tables.optimizer.step()
    assert sorted(tables.rows_of("users", torch.tensor(IDS)).tolist())[0] >= 0


def test_hashed_ids_begin_anew_with_a_warning() -> None:
    model, _ = known_before(False, known={"input_hash_func": lambda ids, size: ids % size})
    with mock.patch("flexd.torchrec.managed_collisions.logger") as logger:
        tables = replace(model, layout=RankLayout(1, 1), admit_after=2)
    assert "4 ids were hashed" in logger.warning.call_args[0][0] % logger.warning.call_args[0][1:]
    assert tables.rows_of("users", torch.tensor(IDS)).tolist() == [-1] * 4
    assert tables.tables[0].admit_after == 2


def test_checkpoints_of_torchrec_would_lose_the_ids_and_are_refused() -> None:
    model = Model(True)
    tables = replace(model, layout=RankLayout(1, 1))
    for state in (ModelState(model, tables), FusedOptimizerState(tables)):
        with pytest.raises(CheckpointError, match="tables users have unbounded ids"):
            state.state_dict()


def test_what_flexd_does_not_return_is_refused() -> None:
    with pytest.raises(EmbeddingError, match=r"users is a ManagedCollision.* with return_remapped_features"):
        replace(Model(True, return_remapped_features=True))
    with pytest.raises(EmbeddingError, match=r"the model is a ManagedCollision.*has no place"):
        replace(Model(True).users)
    shared = Model(False)
    shared.again = shared.users._embedding_module
    with pytest.raises(EmbeddingError, match=r"users._embedding_module is also used at again"):
        replace(shared)
