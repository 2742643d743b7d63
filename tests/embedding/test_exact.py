"""Invariants 1-3: migrations change neither losses nor tables, replicas are bit-equal, versions agree."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.exactness import Scenario, check_training
from tests.support.prefetch_pipeline_jobs import Loop, in_windows, on_accelerator, train
from tests.support.rank_pool import Job, Ranks

pytestmark = pytest.mark.slow

LOOP = Loop(ahead=False, evaluate_every=1)


ALL = [
    (Scenario(2, 2, "sgd_decay", two_dims=True, gamma=0.9, passes=2, seed=2), 1e-9, None),
    (Scenario(2, 2, "rowwise_adagrad", two_dims=True, gamma=0.9, passes=2, seed=2), 1e-9, on_accelerator),
    (Scenario(2, 2, "adagrad", two_dims=True, gamma=0.9, passes=2, seed=2), 1e-9, None),
    (Scenario(2, 2, "adam", two_dims=True, gamma=0.9, passes=2, seed=2), 1e-9, None),
    (Scenario(2, 2, "rowwise_adam", two_dims=True, gamma=0.9, passes=2, seed=2), 1e-9, None),
    (Scenario(1, 4, "rowwise_adagrad", seed=14), 1e-9, None),
    (Scenario(4, 1, "rowwise_adagrad", seed=41), 1e-9, None),
    (Scenario(2, 2, "rowwise_adagrad", dtype="float32"), 1e-5, None),
    # Messages of many peers are made by an index; here all of them, with copies that migrate in the same messages.
    (Scenario(2, 2, "rowwise_adagrad", two_dims=True, seed=8), 1e-9, in_windows),
    (
        Scenario(2, 2, "adam", exchange="direct", passes=2, two_dims=True, slots_share=0.8, seed=9),
        1e-9,
        in_windows,
    ),
    # Rounding grows where a sum is near zero, so tables are compared loosely, and replicas bit by bit.
    (Scenario(2, 2, "sgd", dtype="float32", second_dtype="float16", two_dims=True, steps=6), 0.02, None),
    (Scenario(2, 2, "rowwise_adagrad", dtype="float32", second_dtype="bfloat16", two_dims=True, steps=6), 0.2, None),
    (Scenario(2, 2, "sgd", dtype="float32", second_dtype="bfloat16", two_dims=True, steps=6), 0.02, in_windows),
]


def name_of(value: Scenario | float | Job | None) -> str:
    if isinstance(value, Scenario):
        return f"{value.nodes}x{value.local_ranks}-{value.optimizer}-{value.exchange}-{value.dtype}-{value.seed}"
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("scenario", "tolerance", "kernels"), ALL, ids=name_of)
def test_training_equals_one_process(ranks: Ranks, scenario: Scenario, tolerance: float, kernels: Job | None) -> None:
    """The formula of each optimizer, and what ``test_any_training`` does not draw.

    Args:
        kernels: function that runs the job with the kernels of an accelerator.
    """
    results = ranks(scenario.layout.world_size).run(*((kernels, train) if kernels else (train,)), scenario, LOOP)
    assert results[0]["versions"][-1] >= 1, "the scenario must really migrate rows"
    check_training(results, scenario, tolerance)


@pytest.mark.parametrize("accelerator", [False, True])
def test_stochastic_rounding_does_not_depend_on_the_placement(ranks: Ranks, accelerator: bool) -> None:
    """Bit for bit: replicas after every step, and the tables of a job with migrations and of one without."""
    job = (on_accelerator, train) if accelerator else (train,)
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
