"""A group of followers without faults, and the limits of a follower."""

from __future__ import annotations

import dataclasses

from tests.support.scaleout_world import World, payload


def test_a_group_without_faults_reads_nothing_twice() -> None:
    world = World(3, 2)
    for step in range(12):
        for messages in world.log.values():
            messages += [payload(step % 5, 2)] * 3
        if step % 3 == 2:
            world.assign(step)
        world.drive()
    world.join("f2")
    for _ in range(20):
        world.drive()
    world.check()
    assert world.leader is not None
    assert world.leader.totals() == world.produced()
    assert world.leader.leader.followers.refused() == {}
    assert [follower.follower.stats().restarts for follower in world.followers.values()] == [0, 0, 0]


def test_a_follower_stops_reading_at_the_limit_of_unacknowledged_messages() -> None:
    world = World(1, 1)
    world.log["p0"] += [payload(1, 1)] * 100
    follower = world.followers["f0"]
    follower.follower._options = dataclasses.replace(follower.follower._options, max_unacknowledged_messages=10)
    follower.network.up = False
    for _ in range(30):
        follower.poll(1.0)
    assert follower.follower.stats().paused
    assert 10 <= follower.source.next["p0"] < 30
    world.finish()
