"""Invariants 1-3: migrations change neither losses nor tables, replicas are bit-equal, versions agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexd.core.errors import ChunkRefusedError
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Delta
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.jagged import Jagged
from tests.support import accelerator_jobs, run_ahead_jobs
from tests.support.exactness import Scenario, train_alone
from tests.support.rank_pool import Job, RankPool
from tests.support.run_ahead_jobs import Loop


def bad_input(rank: int, layout: RankLayout, faulty: int) -> list[str]:
    """Pass bad ids on one rank; all ranks must raise an error, and train on afterwards."""
    from flexd.core.errors import EmbeddingError

    collection = EmbeddingCollection([EmbeddingTable("item", 50, 4)], layout=layout)
    good = {"item": Jagged(torch.tensor([1, 2, 3]), torch.tensor([3]))}
    faults = [
        {"item": Jagged(torch.tensor([1, 50]), torch.tensor([2]))},
        {"item": Jagged(torch.tensor([-1]), torch.tensor([1]))},
        {"item": Jagged(torch.tensor([1.5]), torch.tensor([1]))},
        {"nothing": Jagged(torch.tensor([1]), torch.tensor([1]))},
    ]
    texts = []
    for fault in faults:
        try:
            collection(fault if rank == faulty else good)
            texts.append("no error")
        except EmbeddingError as error:
            texts.append(str(error))
        collection(good)["item"].values.sum().backward()
        collection.optimizer.step()
    return texts


def refused(rank: int, layout: RankLayout) -> str:
    collection = EmbeddingCollection([EmbeddingTable("item", 50, 4)], layout=layout, replica_slots=[1])
    keys = np.arange(20, dtype=np.int64)
    try:
        collection.engine.inbox.offer(1, Delta(keys, np.zeros(20, np.uint8), np.full(20, Tier.DEVICE, np.uint8)))
    except ChunkRefusedError as error:
        return str(error)
    return "accepted"


pytestmark = pytest.mark.slow

Ranks = Callable[[int], RankPool]
LOOP = Loop(ahead=False, evaluate_every=1)


def check(scenario: Scenario, ranks: Ranks, tolerance: float = 1e-9, kernels: Job | None = None) -> list[dict]:
    """``kernels``: function that runs the job with the kernels of an accelerator."""
    job = (kernels, run_ahead_jobs.train) if kernels else (run_ahead_jobs.train,)
    results = ranks(scenario.layout.world_size).run(*job, scenario, LOOP)
    losses, tables = train_alone(scenario)
    for rank, result in enumerate(results):
        np.testing.assert_allclose(result["trained"], losses[rank], rtol=0, atol=tolerance)
        assert result["unequal"] == 0, "a replica differed from its home copy"
        assert result["versions"] == results[0]["versions"], "ranks at different placement versions"
        assert result["digest"] == results[0]["digest"]
        for name, table in tables.items():
            np.testing.assert_allclose(result["tables"][name], table, rtol=0, atol=tolerance)
    return results


LAYOUTS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1)]
MARKED_LAYOUTS = [
    each if each in [(1, 1), (2, 2)] else pytest.param(*each, marks=pytest.mark.long) for each in [*LAYOUTS, (3, 2)]
]


@pytest.mark.parametrize(("nodes", "local_ranks"), MARKED_LAYOUTS)
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_training_equals_one_process(ranks: Ranks, nodes: int, local_ranks: int, optimizer: str) -> None:
    results = check(Scenario(nodes, local_ranks, optimizer, seed=nodes * 10 + local_ranks), ranks)
    assert results[0]["versions"][-1] >= 3, "the scenario must really migrate rows"


def test_direct_exchange_is_exact(ranks: Ranks) -> None:
    check(Scenario(2, 2, "rowwise_adagrad", exchange="direct"), ranks)


@pytest.mark.parametrize(("nodes", "local_ranks"), [(2, 2), (2, 1)])
def test_tables_of_two_dims_are_exact(ranks: Ranks, nodes: int, local_ranks: int) -> None:
    check(Scenario(nodes, local_ranks, "rowwise_adagrad", two_dims=True), ranks)


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(2, 2, "rowwise_adagrad", two_dims=True, seed=2),
        Scenario(2, 2, "adam", passes=2, two_dims=True, replica_fraction=0.8, seed=3),
        Scenario(2, 2, "rowwise_adagrad", exchange="direct", two_dims=True, seed=4),
        pytest.param(Scenario(4, 1, "rowwise_adagrad", two_dims=True, seed=5), marks=pytest.mark.long),
        pytest.param(Scenario(3, 2, "sgd", idle_rank=2, seed=6), marks=pytest.mark.long),
        Scenario(1, 1, seed=7),
    ],
    ids=str,
)
def test_kernels_of_an_accelerator_are_exact(ranks: Ranks, scenario: Scenario) -> None:
    """The code paths for tensors that are not in host memory, on tensors of the CPU."""
    check(scenario, ranks, kernels=accelerator_jobs.run)


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(2, 2, "rowwise_adagrad", two_dims=True, seed=8),
        Scenario(2, 2, "adam", exchange="direct", passes=2, two_dims=True, replica_fraction=0.8, seed=9),
    ],
    ids=str,
)
def test_messages_in_units_are_exact(ranks: Ranks, scenario: Scenario) -> None:
    """Those of many peers are; here all of them, with copies that migrate in the same messages."""
    check(scenario, ranks, kernels=accelerator_jobs.run_in_units)


def test_a_narrow_wire_rounds_alike_in_units(ranks: Ranks) -> None:
    """Messages in units and joined ones train equally. That the wire leaves a rank's own gradients unrounded is not
    shown by this."""
    scenario = Scenario(2, 2, "sgd", dtype="float32", two_dims=True, steps=6, comm_dtype="bfloat16")
    joined, units = (
        ranks(4).run(kernels, run_ahead_jobs.train, scenario, LOOP)
        for kernels in (accelerator_jobs.run, accelerator_jobs.run_in_units)
    )
    for mine, other in zip(units, joined, strict=True):
        assert mine["losses"] == other["losses"]
        assert all(np.array_equal(table, other["tables"][name]) for name, table in mine["tables"].items())


@pytest.mark.parametrize("kernels", [accelerator_jobs.run, accelerator_jobs.run_in_units])
def test_mixed_dtypes_with_the_kernels_of_an_accelerator(ranks: Ranks, kernels: Job) -> None:
    scenario = Scenario(2, 2, "sgd", dtype="float32", second_dtype="bfloat16", two_dims=True, steps=6)
    check(scenario, ranks, tolerance=2e-2, kernels=kernels)


def test_several_passes_a_step_are_exact(ranks: Ranks) -> None:
    check(Scenario(2, 2, "rowwise_adagrad", passes=3), ranks)


@pytest.mark.parametrize(
    ("optimizer", "nodes", "local_ranks"),
    [("adagrad", 2, 2), ("adam", 2, 2), ("adam", 2, 1), ("rowwise_adam", 2, 2), ("sgd_decay", 1, 2), ("adam", 1, 1)],
)
def test_every_optimizer_is_exact(ranks: Ranks, optimizer: str, nodes: int, local_ranks: int) -> None:
    """This includes optimizers with several state values a row, and those that change rows without a gradient."""
    check(Scenario(nodes, local_ranks, optimizer, two_dims=True, gamma=0.9, passes=2, seed=nodes), ranks)


def test_a_learning_rate_schedule_is_exact(ranks: Ranks) -> None:
    check(Scenario(2, 2, "rowwise_adagrad", gamma=0.8), ranks)


def test_summed_gradients_are_exact(ranks: Ranks) -> None:
    check(Scenario(2, 2, average_gradients=False), ranks)


def test_a_rank_without_input_trains_equally(ranks: Ranks) -> None:
    check(Scenario(2, 2, "rowwise_adagrad", idle_rank=3, two_dims=True), ranks)


def test_float32_beside_float64(ranks: Ranks) -> None:
    check(Scenario(2, 2, "rowwise_adagrad", second_dtype="float32", two_dims=True), ranks, tolerance=1e-5)


@pytest.mark.parametrize(("dtype", "optimizer"), [("float16", "sgd"), ("bfloat16", "rowwise_adagrad")])
def test_half_precision_beside_float32(ranks: Ranks, dtype: str, optimizer: str) -> None:
    """Rounding grows where a sum is near zero, so tables are compared loosely, and replicas bit by bit."""
    scenario = Scenario(2, 2, optimizer, dtype="float32", second_dtype=dtype, two_dims=True, steps=6)
    check(scenario, ranks, tolerance={"float16": 0.02, "bfloat16": 0.2}[dtype])


@pytest.mark.parametrize("accelerator", [False, True])
def test_stochastic_rounding_does_not_depend_on_the_placement(ranks: Ranks, accelerator: bool) -> None:
    """Bit for bit: replicas after every step, and the tables of a job with migrations and of one without."""
    job = (accelerator_jobs.run, run_ahead_jobs.train) if accelerator else (run_ahead_jobs.train,)
    moving = Scenario(2, 2, "adam", dtype="bfloat16", second_dtype="float16", two_dims=True, passes=2, seed=5)
    moved = ranks(4).run(*job, moving, LOOP)
    still = ranks(4).run(*job, replace(moving, migrate_every=1000), LOOP)
    assert moved[0]["versions"][-1] >= 3
    assert still[0]["versions"][-1] == 0
    for one, other in zip(moved, still, strict=True):
        assert one["unequal"] == 0
        assert one["losses"] == other["losses"]
        for name, table in one["tables"].items():
            np.testing.assert_array_equal(table, other["tables"][name])


def test_float32_is_exact_to_rounding(ranks: Ranks) -> None:
    check(Scenario(2, 2, "rowwise_adagrad", dtype="float32"), ranks, tolerance=1e-5)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout=st.sampled_from(LAYOUTS),
    optimizer=st.sampled_from(["sgd", "rowwise_adagrad", "adagrad", "adam", "rowwise_adam"]),
    seed=st.integers(0, 10_000),
    fraction=st.sampled_from([0.05, 0.3, 1.0]),
    every=st.integers(1, 3),
    two_dims=st.booleans(),
)
def test_any_schedule_of_migrations_is_exact(
    ranks: Ranks, layout: tuple[int, int], optimizer: str, seed: int, fraction: float, every: int, two_dims: bool
) -> None:
    check(
        Scenario(
            *layout, optimizer, seed=seed, steps=12, replica_fraction=fraction, migrate_every=every, two_dims=two_dims
        ),
        ranks,
    )


def test_migrations_reduce_the_bytes_of_the_all_to_all(ranks: Ranks) -> None:
    unmoved = ranks(4).run(run_ahead_jobs.train, Scenario(2, 2, migrate_every=1000), LOOP)
    moving = ranks(4).run(run_ahead_jobs.train, Scenario(2, 2), LOOP)
    for kind in ("node_accesses", "device_accesses"):
        assert sum(r["traffic"][kind] for r in unmoved) == 0
        assert sum(r["traffic"][kind] for r in moving) > 0
    inter = [sum(r["traffic"]["all_to_all_inter_bytes"] for r in results) for results in (unmoved, moving)]
    assert inter[1] < inter[0]
    accesses = [
        sum(r["traffic"][f"{tier}_accesses"] for tier in ("home", "node", "device") for r in results)
        for results in (unmoved, moving)
    ]
    assert accesses[0] == accesses[1], "every look-up is counted once, at the tier that serves it"


@pytest.mark.parametrize(("nodes", "local_ranks", "faulty"), [(1, 1, 0), (2, 2, 3), (2, 1, 0), (1, 2, 1)])
def test_invalid_input_is_refused_on_every_rank(ranks: Ranks, nodes: int, local_ranks: int, faulty: int) -> None:
    layout = RankLayout(nodes, local_ranks)
    texts = ranks(layout.world_size).run(bad_input, layout, faulty)
    expected = ["row 50 of table 'item' is outside 0..49", "row -1", "torch.float32", "'nothing'"]
    for rank, got in enumerate(texts):
        for text, cause in zip(got, expected, strict=True):
            assert (cause if rank == faulty else f"rank {faulty} has input") in text


def test_a_chunk_beyond_the_budget_is_refused(ranks: Ranks) -> None:
    for text in ranks(4).run(refused, RankLayout(2, 2)):
        assert "needs" in text
        assert "replica slots" in text
