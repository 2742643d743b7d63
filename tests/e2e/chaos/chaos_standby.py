"""Faults of a world with two daemons and one lease."""

from __future__ import annotations

import random
import signal
import time

from tests.e2e.chaos.chaos_faults import STEPS_DURING, Injection
from tests.e2e.chaos.chaos_world import ChaosWorld
from tests.support.until import until

_TAKEOVER_SECONDS = 60.0


def kill_leader(world: ChaosWorld, chance: random.Random) -> str:
    """Recovery has the take-over in it."""
    _both(world)
    assert world.daemon is not None
    time.sleep(chance.uniform(0.0, 1.0))
    world.daemon.kill()
    world.hand_over()
    world.steps_on(STEPS_DURING)
    return ""


def end_leader(world: ChaosWorld, chance: random.Random) -> str:
    """SIGTERM: it hands the lease over."""
    _both(world)
    time.sleep(chance.uniform(0.0, 1.0))
    world.stop_daemon()
    world.hand_over()
    world.steps_on(STEPS_DURING)
    return ""


def stop_leader(world: ChaosWorld, chance: random.Random) -> str:
    """It is resumed when the other one leads, in the belief that it still does."""
    _both(world)
    old = world.daemon
    assert old is not None
    time.sleep(chance.uniform(0.0, 1.0))
    old.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    world.hand_over()
    try:
        until(lambda: world.role() == "leader" and world.ready(), _TAKEOVER_SECONDS, world.where)
        led = time.monotonic() - stopped
        world.steps_on(STEPS_DURING)
    finally:
        old.signal(signal.SIGCONT)
    world.steps_on(STEPS_DURING)
    until(lambda: world.role(1) == "standby", _TAKEOVER_SECONDS, old.tail)
    assert world.role() == "leader", world.where()
    return f"followed by the other after {led:.1f} s"


def kill_standby(world: ChaosWorld, chance: random.Random) -> str:
    _both(world)
    assert world.standby is not None
    world.standby.kill()
    world.steps_on(STEPS_DURING)
    return ""


def kill_both(world: ChaosWorld, chance: random.Random) -> str:
    _both(world)
    for child in (world.daemon, world.standby):
        assert child is not None
        child.kill()
    world.steps_on(STEPS_DURING)
    world.start_daemon()
    return ""


KINDS: dict[str, list[Injection]] = {
    "leader killed, a stand-by takes over": [kill_leader],
    "leader ended, a stand-by takes over": [end_leader],
    "leader stopped, resumed when another leads": [stop_leader],
    "stand-by killed": [kill_standby],
    "leader and stand-by killed": [kill_both],
}


def _both(world: ChaosWorld) -> None:
    """One leads, the other stands by."""
    until(lambda: world.role() == "leader", _TAKEOVER_SECONDS, world.where)
    if world.standby is None or not world.standby.alive:
        world.start_standby()
    until(lambda: world.role(1) == "standby", _TAKEOVER_SECONDS, world.where)
