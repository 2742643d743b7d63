"""A daemon that is killed several times while it rolls a migration back."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import httpx

from tests.e2e.chaos.chaos_training import TABLES
from tests.e2e.chaos.chaos_world import ChaosWorld
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.until import until

_SECONDS = 60.0
_STEPS_DURING = 8
_ROWS_A_CHUNK = 4
_SLOWLY = {
    "FLEXD__PLANNER__INTERVAL_SECONDS": "3600",
    "FLEXD__CONTROL__CHUNK_ROWS": str(_ROWS_A_CHUNK),
    "FLEXD__CONTROL__THROTTLE__BYTES_PER_SECOND": "300",
}
"""One plan in a life, of which four or five rows per second are copied: it is met in the middle."""
_PINNED_ROWS = 60


def kill_in_a_rollback(world: ChaosWorld, chance: random.Random) -> str:
    """Abort with a rollback; the daemon is killed before the rollback begins, the next one in the middle of its second
    chunk. The third continues until the ranks have their former placement, and its history has every attempt.
    """
    assert world.daemon is not None
    world.daemon.kill()
    # Whatever is popular just now, this is something to migrate.
    pin = {"table": "item", "tier": "DEVICE", "rows": chance.sample(range(TABLES["item"][0]), _PINNED_ROWS)}
    slowly = {**_SLOWLY, "FLEXD__PLANNER__PINS": json.dumps([pin])}
    # When what is taken back has ended, or when its rollback has started.
    point = chance.choice(["migration.finished:1", "migration.started:2"])
    first = world.start_daemon(f"{point}:kill", **slowly)
    stopped = dict(until(lambda: _in_the_middle(world), _SECONDS, world.where))
    before = _digest_at(world, stopped["base_version"])
    with contextlib.suppress(httpx.TransportError):
        # The answer may be lost with the daemon; the request is not: both points lie behind its being written down.
        body = {"rollback": True, "wait_seconds": 0}
        httpx.post(f"{world.url}/v1/abort", json=body, headers=COMMAND_HEADERS, timeout=10.0).raise_for_status()
    until(lambda: not first.alive, _SECONDS, world.where)
    world.steps_on(_STEPS_DURING)
    second = world.start_daemon("chunk.half_sent:2:kill", **slowly)
    until(lambda: not second.alive, _SECONDS, world.where)
    assert _newest_digest(world) != before
    world.steps_on(_STEPS_DURING)
    third = world.start_daemon(**slowly)
    until(lambda: world.ready() and _newest_digest(world) == before, _SECONDS, world.where)
    rollback = f"{stopped['migration_id']}.rollback"
    told = until(lambda: _committed(world), _SECONDS, world.where)
    tries = [(each["migration_id"], each["state"]) for each in told if each["migration_id"].startswith(rollback)]
    assert tries[0][1] == "committed", tries
    # The history is written behind: of a try that died at once it knows nothing.
    assert all(state == "failed" for _, state in tries[1:]), tries
    assert tries[0][0] != rollback, "the id of the second daemon's"
    third.kill()
    world.start_daemon()
    return f"{point}, {len(tries)} tries"


def _in_the_middle(world: ChaosWorld) -> dict[str, Any] | None:
    migration = world.status().get("migration") or {}
    # So many that the rollback has more than two chunks.
    return migration if migration.get("state") == "pushing" and migration["chunks_applied"] >= 5 else None


def _committed(world: ChaosWorld) -> list[dict[str, Any]]:
    """The history, once the newest migration is at its end."""
    found = httpx.get(f"{world.url}/v1/migrations", timeout=10.0).json()["migrations"]
    return list(found) if found[0]["state"] == "committed" else []


def _digest_at(world: ChaosWorld, version: int) -> int:
    """Return the digest of the placement that the ranks had at a version."""
    world.job.follow()
    return next(step.digest for step in reversed(world.job.steps[0]) if step.version == version)


def _newest_digest(world: ChaosWorld) -> int:
    world.job.follow()
    return world.job.steps[0][-1].digest
