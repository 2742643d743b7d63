"""Upgrades back and forth under training: daemon and ranks change to the other version and back."""

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
    moving = ("pushing", "applying")
    until(lambda: (world.status().get("migration") or {}).get("state") in moving, _SECONDS, world.where)
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


KINDS: dict[str, list[Injection]] = {"daemon upgraded": [upgrade_daemon], "ranks upgraded": [upgrade_ranks]}


def _other(world: ChaosWorld, server: ProcessServer) -> ProcessServer:
    assert world.next_server is not None
    return world.next_server if server is world.server else world.server


def _name(world: ChaosWorld, server: ProcessServer) -> str:
    return "this version" if server is world.server else "the next version"
