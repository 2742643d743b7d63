"""AutoShard's policy on tasks of a known cost: it learns, keeps to the memory and is the same for the same seed."""

from __future__ import annotations

import autoshard_policy
import numpy as np
import pytest
from autoshard_policy import AutoShardPolicy, ShardingTask

from flexd.core.errors import PlanError

TABLES, DEVICES = 10, 3


def draw(rng: np.random.Generator, memory: float = np.inf) -> ShardingTask:
    """A task in which the seconds of a device are the sum over its tables."""
    cost = np.exp(rng.normal(0.0, 1.0, TABLES))

    def seconds(device: np.ndarray) -> np.ndarray:
        return np.stack([(cost * (device == one)).sum(axis=1) for one in range(DEVICES)], axis=1)

    share = cost * TABLES / cost.sum()
    return ShardingTask(np.stack([share, np.log(share)], axis=1), cost, np.ones(TABLES), DEVICES, memory, seconds)


def trained(updates: int, seed: int = 0) -> AutoShardPolicy:
    policy = AutoShardPolicy(2, seed)
    autoshard_policy.train(policy, draw, updates, seed)
    return policy


def busiest(policy: AutoShardPolicy | None) -> float:
    """Mean over 20 held-out tasks of the busiest device over the mean one; without a policy of random placements."""
    rng, found = np.random.default_rng(99), []
    for _ in range(20):
        task = draw(rng)
        device = rng.integers(0, DEVICES, (20, TABLES))
        if policy is not None:
            device = policy.best(task, 0)[None]
        seconds = task.device_seconds(device)
        found.append(float((seconds.max(axis=1) / seconds.mean(axis=1)).mean()))
    return float(np.mean(found))


def test_the_policy_learns_to_balance_tasks_that_it_never_saw() -> None:
    learned = busiest(trained(80))
    assert learned - 1 < 0.6 * (busiest(None) - 1)
    assert learned < busiest(AutoShardPolicy(2, 0))


def test_the_same_seed_gives_the_same_policy_and_placements() -> None:
    first = trained(5)
    autoshard_policy.torch.rand(1)  # the global generator moves on
    again, other = trained(5), trained(5, seed=1)
    task = draw(np.random.default_rng(1))
    assert np.array_equal(first.best(task, 4), again.best(task, 4))
    assert all((one == two).all() for one, two in zip(first.parameters(), again.parameters(), strict=True))
    assert not all((one == two).all() for one, two in zip(first.parameters(), other.parameters(), strict=True))


def test_a_device_without_room_gets_no_table() -> None:
    generator = autoshard_policy.torch.Generator().manual_seed(0)
    placed = AutoShardPolicy(2).place(draw(np.random.default_rng(0), memory=4.0), 50, generator)
    counts = np.stack([(placed.device == one).sum(axis=1) for one in range(DEVICES)], axis=1)
    assert placed.fits.all()
    assert counts.max() == 4
    tight = draw(np.random.default_rng(0), memory=3.0)
    assert not AutoShardPolicy(2).place(tight).fits.any()
    assert AutoShardPolicy(2).best(tight, 3) is None


def test_drawn_placements_are_kept_only_where_they_are_better() -> None:
    policy, task = AutoShardPolicy(2), draw(np.random.default_rng(3))
    likely = task.device_seconds(policy.best(task, 0)[None]).max()
    assert task.device_seconds(policy.best(task, 30)[None]).max() < likely


def test_a_table_larger_than_a_device_is_refused() -> None:
    with pytest.raises(PlanError, match="larger than a device"):
        draw(np.random.default_rng(0), memory=0.5)
