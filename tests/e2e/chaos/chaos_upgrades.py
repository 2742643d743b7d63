"""Upgrades back and forth under training: daemon, ranks and followers change to the other version and back."""

from __future__ import annotations

import random

from tests.e2e.chaos.chaos_faults import STEPS_DURING, Injection
from tests.e2e.chaos.chaos_processes import ProcessServer
from tests.e2e.chaos.chaos_training import WORLD
from tests.e2e.chaos.chaos_world import ChaosWorld
from tests.support.until import until

_SECONDS = 60.0


def upgrade_daemon(world: ChaosWorld, chance: random.Random) -> str:
    """Another version continues from the state of the daemon before it, under the ranks that are there."""
    assert world.daemon is not None
    how = chance.choice(("ended", "killed"))
    until(lambda: (world.status().get("migration") or {}).get("state") == "PUSHING", _SECONDS, world.where)
    if how == "ended":
        world.stop_daemon()
    else:
        world.daemon.kill()
    world.steps_on(STEPS_DURING)
    world.daemon_server = _other(world, world.daemon_server)
    world.start_daemon()
    return f"{how}, then {_name(world, world.daemon_server)}"


def upgrade_ranks(world: ChaosWorld, chance: random.Random) -> str:
    """The job is launched again from its newest checkpoint, all of it or half of it in the other version."""
    for child in world.job.children:
        child.kill()
    other = _other(world, world.rank_servers[0])
    mixed = chance.random() < 0.5
    world.rank_servers = [world.server if mixed and rank % 2 else other for rank in range(WORLD)]
    launched = world.launch()
    until(lambda: launched.done >= 3, _SECONDS, lambda: launched.children[0].tail())
    return ", ".join(_name(world, server) for server in world.rank_servers)


def upgrade_follower(world: ChaosWorld, chance: random.Random) -> str:
    assert world.follower is not None
    world.follower.kill()
    world.follower_server = _other(world, world.follower_server)
    world.steps_on(STEPS_DURING)
    world.start_follower()
    return _name(world, world.follower_server)


def upgrade_pair(world: ChaosWorld, chance: random.Random) -> str:
    """The stand-by first, then the leader hands over to it and comes back as the stand-by."""
    until(lambda: world.role() == "leader", _SECONDS, world.where)
    if world.standby is not None and world.standby.alive:
        world.standby.kill()
    world.daemon_server = _other(world, world.daemon_server)
    world.start_standby()
    until(lambda: world.role(1) == "standby", _SECONDS, world.where)
    world.stop_daemon()
    world.hand_over()
    world.steps_on(STEPS_DURING)
    world.start_standby()
    return _name(world, world.daemon_server)


def kinds(*, scale_out: bool, standby: bool) -> dict[str, list[Injection]]:
    """Every upgrade that there is in such a world."""
    if standby:
        return {"leader and stand-by upgraded": [upgrade_pair]}
    found: dict[str, list[Injection]] = {"daemon upgraded": [upgrade_daemon], "ranks upgraded": [upgrade_ranks]}
    if scale_out:
        found["follower upgraded"] = [upgrade_follower]
    return found


def _other(world: ChaosWorld, server: ProcessServer) -> ProcessServer:
    assert world.next_server is not None
    return world.next_server if server is world.server else world.server


def _name(world: ChaosWorld, server: ProcessServer) -> str:
    return "this version" if server is world.server else "the next version"
