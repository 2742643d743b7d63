"""Objects of the trainer that flexd keeps between two calls may be changed afterwards without any effect, or an error.

Batches announced to ``flexd.prefetch`` are in ``prefetch/test_pipeline.py``, those kept by a tap in ``test_tap.py``.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.placement import RankLayout
from flexd.embedding.checkpoint.sharded_state import ShardedState
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.node_sampler import NodeSampler
from tests.support.rank_pool import Ranks

ROWS = 20
Touch = Callable[[torch.Tensor], object]


def leave(_: torch.Tensor) -> None:
    """Change nothing."""


def spoil(one: torch.Tensor) -> None:
    """Write other numbers, which are ids and rates too."""
    with torch.no_grad():
        one.fill_(1)


def batch(number: int = 0) -> dict[str, flexd.Jagged]:
    return {"item": flexd.Jagged((torch.arange(6) * (number + 1)) % ROWS, torch.tensor([4, 2]))}


def rows_of(out: Any) -> torch.Tensor:
    found: torch.Tensor = out if isinstance(out, torch.Tensor) else out.values
    return found


def numbers_of_a_step(collection: EmbeddingCollection, touch: Touch) -> None:
    """Change ids and lengths after their look-up, the rows, and the gradient, which ``retain_graph`` leaves, after the
    backward pass."""
    for number in range(3):
        given = batch(number)
        out = rows_of(collection(given)["item"])
        out.retain_grad()
        touch(given["item"].values)
        loss = out.sin().sum()
        loss.backward(retain_graph=True)
        given_gradient = torch.full_like(out, 0.5)
        out.backward(given_gradient)
        touch(given_gradient)
        touch(out.grad)
        touch(out)
        touch(given["item"].lengths)
        collection.optimizer.step()


def learning_rate(collection: EmbeddingCollection, touch: Touch) -> None:
    """Change a learning rate after the step, whose deferred gradients are pushed later."""
    rate = torch.tensor(0.1, dtype=torch.float64)
    collection.optimizer.param_groups[0]["lr"] = rate
    for given in flexd.prefetch([batch(number) for number in range(4)], collection, ahead=1):
        rate.fill_(0.1)
        rows_of(collection(given)["item"]).sin().sum().backward()
        collection.optimizer.step()
        touch(rate)


def loaded(collection: EmbeddingCollection, touch: Touch) -> None:
    """Change values after they were loaded, in the middle of a loop too."""
    for source in (None, 0):
        values = torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        collection.load_rows("item", 3, values, source=source)
        touch(values)
    for given in flexd.prefetch([batch(number) for number in range(3)], collection, ahead=1):
        rows_of(collection(given)["item"]).sum().backward()
        collection.optimizer.step()
        values = torch.full((2, 4), 0.25, dtype=torch.float64)
        collection.load_rows("item", 7, values)
        touch(values)


def states(collection: EmbeddingCollection, touch: Touch) -> None:
    """Change state dictionaries after they were made, and after they were loaded."""
    numbers_of_a_step(collection, leave)
    for holder in (collection, ShardedState(collection)):
        made = holder.state_dict()
        before = {key: value.clone() for key, value in made.items()}
        numbers_of_a_step(collection, leave)
        assert all(torch.equal(value, before[key]) for key, value in made.items()), "training must not change them"
        holder.load_state_dict(made)
        for value in made.values():
            touch(value)
    optimizer = collection.optimizer.state_dict()
    collection.optimizer.load_state_dict(optimizer)
    touch(optimizer["state"][0]["step"])
    numbers_of_a_step(collection, leave)


def train(
    rank: int, work: Callable[[EmbeddingCollection, Touch], None], touch: Touch, kind: str, settings: dict[str, Any]
) -> torch.Tensor:
    pooled = {"pooling_at": kind} if kind else {}
    make, table = (
        (flexd.EmbeddingBagCollection, flexd.EmbeddingBagTable)
        if kind
        else (flexd.EmbeddingCollection, flexd.EmbeddingTable)
    )
    collection = make(
        [table("item", ROWS, 4, dtype="float64", **pooled)], optimizer=flexd.Adam(lr=0.1), layout=RankLayout(2, 1),
        **settings,
    )  # fmt: skip
    work(collection, touch)
    return collection.gather_table("item")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("", {}), ("", {"fast_memory_bytes": 1}), ("", {"copies_memory_bytes": 2000}), ("requester", {}), ("owner", {})],
)
@pytest.mark.parametrize("work", [numbers_of_a_step, learning_rate, loaded, states])
def test_what_is_changed_after_the_call_is_not_trained(
    ranks: Ranks, work: Callable[[EmbeddingCollection, Touch], None], kind: str, settings: dict[str, Any]
) -> None:
    touched, plain = (ranks(2).run(train, work, touch, kind, settings)[0] for touch in (spoil, leave))
    torch.testing.assert_close(touched, plain, rtol=0, atol=0)


def test_the_lengths_of_rows_are_those_of_the_batch() -> None:
    given = batch()
    assert EmbeddingCollection([flexd.EmbeddingTable("item", ROWS, 4)])(given)["item"].lengths is given["item"].lengths


def test_lists_of_settings_may_be_used_again() -> None:
    features, tables, wires, slots = ["item", "also"], [], [None, "float32"], [3]
    tables.append(flexd.EmbeddingTable("item", ROWS, 4, features=features))  # type: ignore[arg-type]
    collection = EmbeddingCollection(tables, comm_dtype=wires, replica_slots=slots)
    tables.clear()
    features[:] = ["other"]
    wires[:] = ["float8"]
    slots[:] = [10**9]
    assert set(collection.table_of_feature) == {"item", "also"}
    for number in range(3):
        rows_of(collection(batch(number))["item"]).sum().backward()
        collection.optimizer.step()
    assert collection.replica_slots == (3,)
    assert collection.tables[0].feature_names == ("item", "also")


def test_a_sampler_keeps_no_view_of_the_ids() -> None:
    collection = EmbeddingCollection([flexd.EmbeddingTable("item", ROWS, 4)])
    values = torch.arange(40) % ROWS
    lengths = torch.full((20,), 2)
    sampler = NodeSampler({"item": flexd.Jagged(values, lengths)}, collection, 4)
    before, offsets = sampler._keys.copy(), sampler._offsets.copy()
    spoil(values)
    spoil(lengths)
    assert (sampler._keys == before).all()
    assert (sampler._offsets == offsets).all()
    assert sorted(index for chosen in sampler for index in chosen) == list(range(20))


def test_a_weight_that_was_written_to_is_refused_when_it_is_read_again() -> None:
    embedding = flexd.Embedding(ROWS, 4).eval()
    before = embedding.weight.clone()
    embedding.weight.mul_(2)
    with pytest.raises(EmbeddingError, match=r"table 'embedding': its weight was written to.*load_rows.*clone"):
        _ = embedding.weight
    embedding.train()
    embedding(torch.tensor([1])).sum().backward()
    embedding.optimizer.step()
    embedding.eval()
    changed = (embedding.weight != before).any(dim=1)
    assert changed.nonzero().tolist() == [[1]], "it is gathered again after a step"
