"""Prefetch pipeline changes neither losses nor tables, with any other work in the loop."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.placement import RankLayout
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.exchange.arms import Arm
from flexd.embedding.features import Jagged
from tests.support.exactness import (
    Scenario,
    train_alone,
)
from tests.support.prefetch_pipeline_jobs import WAYS, Loop, pipeline_of, threads, train
from tests.support.rank_pool import Ranks, error_of


def one_buffer(rank: int, one_thread: bool, depth: int, again: bool) -> str:
    """Train while the loader of the last rank fills one buffer for every batch; return the error. With ``depth`` 0,
    batches are not located ahead.

    Args:
        again: a batch that is refused is looked up once more.
    """
    collection = EmbeddingCollection([EmbeddingTable("item", 50, 4)], layout=RankLayout(2, 1))
    if depth == 0:
        collection.engine.arm.propose(Arm("chain", prefetch=False))
    buffer = torch.zeros(3, dtype=torch.int64)

    def loader() -> Iterator[dict[str, Jagged]]:
        for index in range(6):
            buffer.copy_(torch.arange(3) + index)
            yield {"item": Jagged(buffer if rank == 1 else buffer.clone(), torch.tensor([3]))}

    def loop() -> None:
        for features in flexd.prefetch(loader(), collection, one_thread=one_thread, ahead=depth or None):
            if again:
                assert "rank 1" in error_of(lambda features=features: collection(features))
            collection(features)["item"].values.sum().backward()
            collection.optimizer.step()

    return error_of(loop)


def masked_badly(rank: int, one_thread: bool | None, bad: int) -> tuple[str, list[int]]:
    """Train with a tap; the loop of the last rank masks an id that no row has. Without the prefetch pipeline if
    ``one_thread`` is None. Return the error, and the rows that the tap has counted."""
    collection = EmbeddingCollection([EmbeddingTable("item", 50, 4)], layout=RankLayout(2, 1))
    tap = flexd.Tap(collection)
    loader: Any = [{"item": Jagged(torch.arange(3) + index, torch.tensor([3]))} for index in range(4)]
    if one_thread is not None:
        loader = flexd.prefetch(loader, collection, one_thread=one_thread)

    def loop() -> None:
        for index, features in enumerate(loader):
            if index == 2 and rank == 1:
                features["item"].values[1] = bad
            collection(features)["item"].values.sum().backward()
            collection.optimizer.step()

    text = error_of(loop)
    return text, tap._counting.rows.drain()[0].rows.tolist()


pytestmark = pytest.mark.slow


def check(scenario: Scenario, ranks: Ranks, loop: Loop) -> list[dict]:
    """Compare with training in one process or, if the loop does more, with training without the prefetch pipeline and
    without migrations."""
    pool = ranks(scenario.layout.world_size)
    results = pool.run(train, scenario, loop)
    same = {"announced_passes": 0, "loops": 1, "break_at": -1, "changes": "", "one_thread": None, "depth": 1}
    if replace(loop, **same) == Loop():
        losses, tables, _ = train_alone(scenario)
        expected = [(part, tables) for part in losses]
    else:
        still = replace(scenario, moved=False, slots_share=0.0)
        plain = pool.run(train, still, replace(loop, ahead=False, loops=1, break_at=-1))
        assert [result["errors"] for result in plain] == [result["errors"] for result in results]
        expected = [(result["losses"], result["tables"]) for result in plain]
    for result, (losses, tables) in zip(results, expected, strict=True):
        assert result["unequal"] == 0, "a replica differed from its home copy"
        assert result["versions"] == results[0]["versions"], "ranks at different placement versions"
        assert result["threads"] == []
        for name in ("digest", "deferred", "unused"):
            assert result[name] == results[0][name], name
        np.testing.assert_allclose(result["losses"], losses, rtol=0, atol=1e-9)
        for name, table in tables.items():
            np.testing.assert_allclose(result["tables"][name], table, rtol=0, atol=1e-9)
    return results


@pytest.mark.parametrize(("passes", "announced"), [(3, 3), (3, 1), (1, 3), (3, 2)])
def test_several_passes_a_step_train_equally_announced_or_not(ranks: Ranks, passes: int, announced: int) -> None:
    results = check(Scenario(2, 2, "rowwise_adagrad", passes=passes, seed=1), ranks, Loop(announced_passes=announced))
    assert (results[0]["deferred"] > 0) == (passes == announced or announced == 1)


@pytest.mark.parametrize(
    "loop",
    [
        Loop(evaluate_every=2),
        Loop(read_every=2),
        Loop(extra_every=2),
        Loop(between_every=2),
        Loop(save_every=3),
        Loop(max_norm=0.05),
        Loop(loops=3),
        Loop(break_at=7),
        Loop(bad_at=0),
        Loop(bad_at=6),
    ],
    ids=["evaluate", "read", "extra pass", "step between", "save", "clip", "loops", "break", "bad 0", "bad 6"],
)
def test_other_work_in_the_loop_changes_nothing(ranks: Ranks, loop: Loop) -> None:
    results = check(Scenario(2, 2, "rowwise_adagrad", two_dims=True, moved=True, seed=5), ranks, loop)
    assert (results[0]["deferred"] == 0) == (loop.max_norm > 0), "all gradients are needed for their norm"
    if loop.bad_at >= 0:
        assert "row -1 of table 'item'" in results[-1]["errors"][0]
        assert all("rank 3 has input" in result["errors"][0] for result in results[:-1])


@pytest.mark.parametrize(("pooling_at", "one_thread"), [(None, False), (("owner", "requester"), True)])
@pytest.mark.parametrize("way", WAYS)
def test_inputs_that_change_after_they_were_announced_train_equally(
    ranks: Ranks, way: str, pooling_at: tuple[str, str] | None, one_thread: bool
) -> None:
    """On the first rank alone. All ranks locate such a batch again, and count it."""
    scenario = Scenario(2, 2, "rowwise_adagrad", steps=6, seed=6, pooling_at=pooling_at)
    assert check(scenario, ranks, Loop(changes=way, one_thread=one_thread))[0]["unused"] > 0


@pytest.mark.parametrize("one_thread", [False, True])
def test_inputs_that_change_as_the_pipeline_is_switched_train_equally(ranks: Ranks, one_thread: bool) -> None:
    """The job after the last batch that is located ahead still tells all ranks whether its input has changed."""
    for seed in range(3):
        scenario = Scenario(2, 2, "rowwise_adagrad", exchange="auto", steps=12, seed=seed)
        results = check(scenario, ranks, Loop(changes="any", one_thread=one_thread, depth=0))
        assert set(results[0]["prefetched"]) == {True, False}


@pytest.mark.parametrize("one_thread", [False, True])
@pytest.mark.parametrize(("depth", "again"), [(0, False), (0, True), (1, False), (1, True), (3, False)])
def test_a_loader_that_fills_one_buffer_again_is_named(ranks: Ranks, one_thread: bool, depth: int, again: bool) -> None:
    """On the last rank alone; the buffers of the other are new."""
    own, other = (found for found in reversed(ranks(2).run(one_buffer, one_thread, depth, again)))
    assert "rank 1: the loader has written a later batch to the memory of this one" in own
    assert "rank 1 has input that cannot be looked up" in other


@pytest.mark.parametrize("one_thread", [False, True])
@pytest.mark.parametrize("bad", [-1, 50])
def test_ids_masked_out_of_range_raise_as_without_prefetch_pipeline(ranks: Ranks, one_thread: bool, bad: int) -> None:
    plain, ahead = (ranks(2).run(masked_badly, each, bad) for each in (None, one_thread))
    assert plain == ahead
    assert [rows for _, rows in plain] == [[0, 1, 2, 3]] * 2, "of the two steps before"
    assert f"row {bad} of table 'item' is outside 0..49" in plain[1][0]
    assert "rank 1 has input" in plain[0][0]


scenarios = st.builds(
    Scenario,
    nodes=st.sampled_from([1, 2, 3]),
    local_ranks=st.just(2),
    optimizer=st.sampled_from(["sgd", "rowwise_adagrad", "adam"]),
    exchange=st.sampled_from(["chain", "auto", "direct"]),
    seed=st.integers(0, 10_000),
    steps=st.just(10),
    slots_share=st.sampled_from([0.0, 0.3, 1.0]),
    migrate_every=st.sampled_from([1, 3, 100]),
    passes=st.integers(1, 2),
    two_dims=st.booleans(),
    only_rail=st.sampled_from([-1, -1, 0]),
    idle_rank=st.sampled_from([-1, -1, 0]),
    moved=st.booleans(),
)
loops = st.builds(
    Loop,
    announced_passes=st.integers(1, 2),
    evaluate_every=st.sampled_from([0, 2]),
    extra_every=st.sampled_from([0, 3]),
    between_every=st.sampled_from([0, 2]),
    read_every=st.sampled_from([0, 3]),
    save_every=st.sampled_from([0, 0, 3]),
    max_norm=st.sampled_from([0.0, 0.0, 0.05]),
    loops=st.integers(1, 2),
    break_at=st.sampled_from([-1, -1, 7]),
    depth=st.sampled_from([0, 1]),
)


EXAMPLES = int(os.environ.get("FLEXD_EXACTNESS_EXAMPLES", "5"))


@pytest.mark.timeout(240 + 10 * EXAMPLES)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(scenario=scenarios, loop=loops)
def test_any_schedule_trains_equally(ranks: Ranks, scenario: Scenario, loop: Loop) -> None:
    """Any schedule trains as without the prefetch pipeline. ``FLEXD_EXACTNESS_EXAMPLES`` sets the number of
    examples."""
    check(scenario, ranks, replace(loop, loops=1 if loop.break_at >= 0 else loop.loops))


def test_a_failed_job_is_raised_at_the_next_step_and_at_every_later_one() -> None:
    collection = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("item", 50, 4)], layout=RankLayout(1, 1), optimizer=flexd.SGD(0.1)
    )
    loader = [{"item": flexd.Jagged(torch.arange(3) + index, torch.tensor([3]))} for index in range(5)]

    def broken(*_: object) -> None:
        raise RuntimeError("connection reset")

    batches = iter(flexd.prefetch(loader, collection))
    collection(next(batches))["item"].values.sum().backward()
    collection.optimizer.step()
    features = next(batches)
    ahead = pipeline_of(collection)
    ahead._job._router.find = broken  # type: ignore[method-assign]
    collection(features)["item"].values.sum().backward()
    with pytest.raises(RuntimeError, match="connection reset"):
        collection.optimizer.step()
    with pytest.raises(EmbeddingError, match="failed before: connection reset"):
        collection(features)
    with pytest.raises(EmbeddingError, match="start again from the last checkpoint"):
        next(batches)
    assert threads() == []
