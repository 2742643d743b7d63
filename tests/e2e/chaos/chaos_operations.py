"""Operations on a running job: a secret is rotated, a table is added and removed again."""

from __future__ import annotations

import os
import random
from typing import Any

import yaml

from tests.e2e.chaos.chaos_faults import STEPS_DURING, Injection, train_for
from tests.e2e.chaos.chaos_world import ChaosWorld
from tests.support.until import until

_READ_SECONDS = 2.0
"""Time within which a process reads a changed secret file (it looks once per second)."""
_SECONDS = 60.0
_EXTRA: dict[str, Any] = {"name": "extra", "rows": 300, "dim": 4, "dtype": "float64", "optimizer": "rowwise_adagrad"}


def rotate_secret(world: ChaosWorld, chance: random.Random) -> str:
    """The three steps of docs/security.md; daemon and ranks read their files in any order."""
    files = [world.directory / "secret", world.directory / "secret-of-ranks"]
    old = files[0].read_text().split("\n")[0]
    new = f"secret {chance.randrange(2**64):x} of the chaos run"
    for keys in (f"{old}\n{new}", f"{new}\n{old}", new):
        for file in chance.sample(files, len(files)):
            unfinished = file.with_suffix(".new")
            unfinished.write_text(keys)
            os.replace(unfinished, file)
            train_for(world, chance.choice((0.0, _READ_SECONDS)))
        train_for(world, _READ_SECONDS)
    return ""


def add_table(world: ChaosWorld, chance: random.Random) -> str:
    """The daemon knows a table more for a while: it counts on, and the ranks, which do not have it, train on."""
    how = chance.choice(("ended", "killed"))
    config = yaml.safe_load(world.config_file.read_text())
    tables = config["tables"]
    at = chance.randrange(len(tables) + 1)
    for now in ([*tables[:at], _EXTRA, *tables[at:]], tables):
        if how == "ended":
            world.stop_daemon()
        else:
            assert world.daemon is not None
            world.daemon.kill()
        world.config_file.write_text(yaml.safe_dump({**config, "tables": now}, sort_keys=False))
        world.start_daemon()
        if now is not tables:
            until(lambda: _counts(world), _SECONDS, world.where)
            world.steps_on(STEPS_DURING)
    return f"as table {at + 1}, the daemon {how} before"


KINDS: dict[str, list[Injection]] = {"secret rotated": [rotate_secret], "table added, then removed": [add_table]}


def _counts(world: ChaosWorld) -> bool:
    tables = (world.status().get("sketch") or {}).get("tables", [])
    return len(tables) == len(world.config.tables) and bool(world.status().get("stream", {}).get("messages"))
