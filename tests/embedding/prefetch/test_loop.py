"""``flexd.prefetch``: its loaders, arguments and loops."""

from collections.abc import Iterable, Iterator

import pytest
import torch

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.placement import RankLayout
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.exchange.arms import Arm
from flexd.embedding.features import Jagged
from tests.support.prefetch_pipeline_jobs import threads
from tests.support.rank_pool import Ranks


def looped(
    rank: int, layout: RankLayout, located: bool, batches: list[int], failing: int = -1
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
        for features in flexd.prefetch(loader(), collection):
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


@pytest.mark.parametrize("located", [True, False])
@pytest.mark.parametrize(("failing", "after"), [(2, 3), (0, 1), (3, 0), (1, 5)])
def test_the_error_of_a_loader_ends_the_loop_of_every_rank(
    ranks: Ranks, failing: int, after: int, located: bool
) -> None:
    """The batches before it are trained. Nobody waits for a deadline."""
    batches = [after if rank == failing else 5 for rank in range(4)]
    for rank, (steps, text, left) in enumerate(
        ranks(4).run(looped, RankLayout(2, 2), located, batches, failing, timeout=60)
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
