"""``flexd.prefetch``: its loaders, arguments and loops."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.placement import RankLayout
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.exchange.arms import Arm
from flexd.embedding.features import Jagged
from tests.support.prefetch_pipeline_jobs import threads
from tests.support.rank_pool import Ranks, error_of


def looped(
    rank: int, layout: RankLayout, located: bool, batches: list[int], failing: int = -1, uneven: str = "error"
) -> tuple[int, str, list[str]]:
    """Train each rank on its own number of batches, after which the loader of one rank may raise; return the steps,
    the error, and remaining threads.

    Args:
        located: whether the batches are located ahead.
    """
    collection = EmbeddingCollection([EmbeddingTable("item", 50, 4)], layout=layout)
    collection.engine.arm.propose(Arm("chain", located))

    def loader() -> Iterator[dict[str, Jagged]]:
        for index in range(batches[rank]):
            yield {"item": Jagged(torch.arange(3) + index, torch.tensor([3]))}
        if rank == failing:
            raise OSError("the disk is gone")

    steps, text = 0, ""
    try:
        for features in flexd.prefetch(loader(), collection, uneven=uneven):
            collection(features)["item"].values.sum().backward()
            collection.optimizer.step()
            steps += 1
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return steps, text, threads()


@pytest.mark.parametrize("located", [True, False])
@pytest.mark.parametrize("batches", [[3, 3, 2, 3], [0, 1, 1, 1], [1, 0, 0, 0], [5, 4, 4, 2]])
def test_uneven_loaders_are_an_error_on_every_rank(ranks: Ranks, batches: list[int], located: bool) -> None:
    for steps, text, left in ranks(4).run(looped, RankLayout(2, 2), located, batches):
        assert steps == min(batches)
        named = int(text.split()[2])
        assert f"rank {named} has no further batch, other ranks have" in text
        assert batches[named] == min(batches)
        assert left == []


def shared_out(
    rank: int, layout: RankLayout, located: bool, uneven: str, trained: list[int], evaluated: list[int]
) -> tuple[list[float], torch.Tensor]:
    """Train each rank on its own number of batches, and evaluate its own number in a loop within, after two steps;
    return the sums of losses over the samples of the rank, and the table. One rank has the samples of all."""
    collection = EmbeddingCollection(
        [EmbeddingTable("item", 50, 4, dtype="float64")], layout=layout, optimizer=flexd.Adam(lr=0.1),
        average_gradients=False,
    )  # fmt: skip
    collection.engine.arm.propose(Arm("chain", located))
    mine = range(len(trained)) if layout.world_size == 1 else [rank]

    def loader(numbers: list[int], shift: int) -> list[dict[str, Jagged]]:
        found = []
        for at in range(max(numbers[each] for each in mine)):
            ids = torch.cat([torch.arange(3) + 4 * each + shift + at for each in mine if at < numbers[each]])
            found.append({"item": Jagged(ids, torch.tensor([len(ids)]))})
        return found

    losses = []
    for number, features in enumerate(flexd.prefetch(loader(trained, 0), collection, uneven=uneven)):
        loss = collection(features)["item"].values.square().sum()
        loss.backward()
        collection.optimizer.step()
        losses.append(float(loss.detach()))
        if number == 1:
            with torch.no_grad():
                every = flexd.prefetch(loader(evaluated, 20), collection, uneven=uneven)
                losses += [float(collection(one)["item"].values.square().sum()) for one in every]
    return losses, collection.gather_table("item")


@pytest.mark.parametrize("located", [True, False])
@pytest.mark.parametrize(
    ("uneven", "trained", "evaluated"),
    [
        ("empty", [3, 3, 2, 4], [1, 1, 0, 3]),
        ("empty", [0, 2, 2, 2], [1, 1, 1, 1]),
        ("empty", [5, 0, 0, 0], [0, 0, 0, 0]),
        ("stop", [3, 3, 2, 4], [1, 2, 3, 3]),
        ("stop", [0, 2, 2, 2], [1, 1, 1, 1]),
    ],
)
def test_loaders_that_end_at_different_batches_equal_one_process(
    ranks: Ranks, uneven: str, trained: list[int], evaluated: list[int], located: bool
) -> None:
    """With "stop" one process has the batches that all ranks have."""
    results = ranks(4).run(shared_out, RankLayout(2, 2), located, uneven, trained, evaluated)
    if uneven == "stop":
        trained, evaluated = [min(trained)] * 4, [min(evaluated)] * 4
    ((losses, table),) = ranks(1).run(shared_out, RankLayout(1, 1), located, "error", trained, evaluated)
    assert [sum(each) for each in zip(*(result[0] for result in results), strict=True)] == pytest.approx(losses)
    for _, of_rank in results:
        torch.testing.assert_close(of_rank, table, rtol=1e-12, atol=0)


def test_empty_batches_of_any_kind_train_as_the_others(ranks: Ranks) -> None:
    """Rank 1 has no batch but the first; the trainer sees all parts of it without samples."""
    first, second = ranks(2).run(kinds)
    assert first == ["3 3 3 3 3", "3 3 3 3 3"]
    assert second == ["3 3 3 3 3", "0 0 0 0 0"]


@dataclass(frozen=True)
class Samples:
    """A batch as trainers write them."""

    ids: dict[str, torch.Tensor]
    labels: np.ndarray
    names: list[str]
    epoch: int = 0


def kinds(rank: int) -> list[str]:
    tables = [EmbeddingTable(name, 50, 4) for name in ("dense", "nested")]
    collection = EmbeddingCollection(tables, layout=RankLayout(2, 1))
    nested = torch.nested.nested_tensor([torch.arange(2), torch.arange(1), torch.arange(3)], layout=torch.jagged)
    batch = Samples({"dense": torch.ones(3, 2, dtype=torch.int32), "nested": nested}, np.ones(3), ["a", "b", "c"])
    seen = []
    for samples in flexd.prefetch([batch] * (2 - rank), collection, features=lambda one: one.ids, uneven="empty"):
        rows = collection(samples.ids)
        sum(each.values.sum() for each in rows.values()).backward()  # type: ignore[union-attr]
        collection.optimizer.step()
        sizes = [len(each.lengths) for each in rows.values()]
        seen.append(
            " ".join(map(str, [*sizes, samples.ids["dense"].shape[0], len(samples.labels), len(samples.names)]))
        )
    return seen


@pytest.mark.parametrize(
    ("batches", "error"),
    [([[], [1]], "its loader has no batch of which"), ([[object()], [object()]], "can be made of a object")],
)
def test_batches_that_cannot_be_made_empty_are_an_error_on_every_rank(
    ranks: Ranks, batches: list[list[object]], error: str
) -> None:
    found = ranks(2).run(impossible, batches, timeout=50)
    assert error in found[0]
    assert error in found[1] or "rank 0: its loader raised an error" in found[1]


def impossible(rank: int, batches: list[list[object]]) -> str:
    collection = EmbeddingCollection([EmbeddingTable("item", 50, 4)], layout=RankLayout(2, 1))

    def train() -> None:
        for _ in flexd.prefetch(batches[rank], collection, features=lambda _: {}, uneven="empty"):
            collection({})

    return error_of(train)


@pytest.mark.parametrize("located", [True, False])
@pytest.mark.parametrize(
    ("failing", "after", "uneven"),
    [
        (2, 3, "error"),
        (0, 1, "error"),
        (3, 0, "error"),
        (1, 5, "error"),
        (2, 3, "stop"),
        (2, 5, "stop"),
        (0, 1, "empty"),
    ],
)
def test_the_error_of_a_loader_ends_the_loop_of_every_rank(
    ranks: Ranks, failing: int, after: int, uneven: str, located: bool
) -> None:
    """The batches before it are trained. Nobody waits for a deadline."""
    batches = [after if rank == failing else 5 for rank in range(4)]
    for rank, (steps, text, left) in enumerate(
        ranks(4).run(looped, RankLayout(2, 2), located, batches, failing, uneven, timeout=60)
    ):
        assert steps == after
        assert left == []
        if rank == failing:
            assert text == "OSError: the disk is gone"
        else:
            assert text.startswith(f"EmbeddingError: rank {failing}: its loader raised an error")


@pytest.mark.parametrize("wrong", [{"passes_per_step": 0}, {"ahead": 0}])
def test_wrong_arguments_are_refused(wrong: dict[str, int]) -> None:
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 5, 4)], layout=RankLayout(1, 1))
    with pytest.raises(EmbeddingError, match="give positive numbers"):
        flexd.prefetch([], collection, **wrong)
    with pytest.raises(EmbeddingError, match="one of error, stop, empty"):
        flexd.prefetch([], collection, uneven="pad")


def nested(rank: int, how: str, one_thread: bool) -> tuple[list[float], torch.Tensor]:
    """Train in one loop and evaluate, or train too, in loops within; without the pipeline if ``how`` is "plain ..."."""
    table = EmbeddingTable("item", 50, 4, dtype="float64")
    collection = EmbeddingCollection([table], layout=RankLayout(2, 1), optimizer=flexd.Adam(lr=0.1))
    plain, within = how.startswith("plain"), how.rpartition(" ")[2]

    def loop(shift: int, number: int) -> Iterable[dict[str, Jagged]]:
        batches = [{"item": Jagged(torch.arange(3) + 2 * rank + shift + at, torch.tensor([3]))} for at in range(number)]
        return batches if plain else flexd.prefetch(batches, collection, one_thread=one_thread, ahead=1)

    def step(features: dict[str, Jagged]) -> float:
        loss = collection(features)["item"].values.square().sum()
        if torch.is_grad_enabled():
            loss.backward()
            collection.optimizer.step()
        return float(loss.detach())

    losses = []
    for number, features in enumerate(loop(0, 5)):
        losses.append(step(features))
        if number % 2:
            with torch.set_grad_enabled(within == "trained"):
                losses += [step(one) for one in loop(number, 3)]
    return losses, collection.gather_table("item")


@pytest.mark.parametrize("one_thread", [False, True])
@pytest.mark.parametrize("within", ["evaluated", "trained"])
def test_loops_within_a_loop_change_nothing(ranks: Ranks, within: str, one_thread: bool) -> None:
    plain, ahead = (ranks(2).run(nested, f"{how} {within}", one_thread) for how in ("plain", "ahead"))
    for (losses, table), (plain_losses, plain_table) in zip(ahead, plain, strict=True):
        assert losses == pytest.approx(plain_losses, rel=1e-12)
        torch.testing.assert_close(table, plain_table, rtol=1e-12, atol=0)


def test_a_loop_within_a_loop_leaves_the_outer_one_to_its_end() -> None:
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 5, 4)], layout=RankLayout(1, 1))
    first = iter(flexd.prefetch([{}, {}], collection))
    next(first)
    assert list(flexd.prefetch([{}], collection)) == [{}]
    assert list(first) == [{}]
    assert list(flexd.prefetch([{}], collection)) == [{}]
