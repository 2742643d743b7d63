"""Touches counted by followers, each of which reads a share of every step's messages, equal those of one daemon."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.layout import RankLayout
from flexd.simulate.exact_profile import exact_profile
from flexd.sketch import touch_counts
from tests.support.scaleout_world import KEYSPACE, ROWS, World, payload

LAYOUT = RankLayout(2, 2)
Steps = list[list[np.ndarray]]


def bursty(steps: int, seed: int = 0) -> Steps:
    """Rows by step and rank; those of a step are near each other, so that independence is far off."""
    random = np.random.default_rng(seed)
    return [
        [np.unique((centre + random.integers(0, 12, 6)) % ROWS) for _ in range(LAYOUT.world_size)]
        for centre in random.integers(ROWS, size=steps)
    ]


def world_of(followers: int, first: list[np.ndarray], random: np.random.Generator) -> World:
    """Four partitions that have carried one step; the leader knows the ranks."""
    world = World(4, followers)
    world.leader.ingestor.profile(layout=LAYOUT)
    produce(world, [first], 0, random)
    for _ in range(10):
        world.drive()
    return world


def produce(world: World, steps: Steps, first: int, random: np.random.Generator) -> None:
    """Write steps, every row a message in any partition, so that each follower has a part of each rank's batch."""
    partitions = sorted(world.log)
    for number, ranks in enumerate(steps, first):
        for rank, rows in enumerate(ranks):
            for row in rows:
                world.log[partitions[int(random.integers(len(partitions)))]].append(payload(int(row), 1, rank, number))


def counted(world: World) -> np.ndarray:
    sketches = world.leader.ingestor._sketches.sketches
    sketches.close_steps()
    touches = sketches._touches[0].read(np.arange(ROWS), sketches.event_clock, LAYOUT)
    return np.stack([touches.per_rank, touches.per_node, touches.anywhere])


def exact(steps: Steps) -> np.ndarray:
    profile = exact_profile(steps, KEYSPACE, LAYOUT).tables[0]
    found = np.zeros((3, ROWS))
    touches = profile.touches
    found[:, profile.hot_rows] = [touches.per_rank, touches.per_node, touches.anywhere]
    return found


def test_followers_count_the_touches_of_nodes_and_steps_exactly():
    random = np.random.default_rng(1)
    steps = bursty(91)
    world = world_of(3, steps[0], random)
    for first in range(1, 91, 30):
        produce(world, steps[first : first + 30], first, random)
        for _ in range(40):
            world.drive()
        world.assign(first // 30 + 1)
    world.finish()
    sketches = world.leader.ingestor._sketches.sketches
    assert sketches._touches[0]._open.total_rows < 20 * 4 * 6, "steps that all have passed are counted"
    np.testing.assert_allclose(counted(world), exact(steps), rtol=1e-12)


def test_a_step_waits_for_the_follower_that_is_behind():
    random = np.random.default_rng(2)
    steps = bursty(60)
    world = world_of(2, steps[0], random)
    world.followers["f1"].network.up = False
    produce(world, steps[1:], 1, random)
    for _ in range(100):
        world.drive()
    assert world.followers["f1"].network.data is not None
    world.finish()
    np.testing.assert_allclose(counted(world), exact(steps), rtol=1e-12)


def test_counts_of_a_follower_that_died_are_read_again_and_touches_stay_exact():
    random = np.random.default_rng(3)
    steps = bursty(60)
    world = world_of(2, steps[0], random)
    produce(world, steps[1:30], 1, random)
    for _ in range(6):
        world.drive()
    world.kill("f1")
    produce(world, steps[30:], 30, random)
    world.finish()
    np.testing.assert_allclose(counted(world), exact(steps), rtol=1e-12)


def test_followers_without_a_leader_hold_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(touch_counts, "_MAX_OPEN_ROWS", 200)
    random = np.random.default_rng(5)
    steps = bursty(30)
    world = world_of(2, steps[0], random)
    produce(world, steps[1:], 1, random)
    for follower in world.followers.values():
        follower.network.up = False
        for _ in range(60):
            follower.poll(0.0)
        held = follower.ingestor._sketches.sketches._touches[0]._open
        assert held.total_rows == held.shared.count <= 200
    world.finish()
    assert np.nansum(counted(world)[0]) > 0
