"""Events of a running job beside faults: rotated secrets, a table for a while, poison on the stream (messages that
no publisher of flexd writes), and upgrades of daemon and ranks back and forth."""

import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import yaml
from kafka import KafkaProducer

from flexd.core import tap_counts
from tests.e2e.chaos.chaos_faults import STEPS_DURING, Injection, train_for
from tests.e2e.chaos.chaos_processes import ProcessServer
from tests.e2e.chaos.chaos_training import WORLD
from tests.e2e.chaos.chaos_world import MAX_MESSAGE_BYTES, PARTITIONS, TOPIC, ChaosWorld
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
            world.daemon.kill()
        world.config_file.write_text(yaml.safe_dump({**config, "tables": now}, sort_keys=False))
        world.start_daemon()
        if now is not tables:
            until(lambda: _counts(world), _SECONDS, world.where)
            world.steps_on(STEPS_DURING)
    return f"as table {at + 1}, the daemon {how} before"


def _counts(world: ChaosWorld) -> bool:
    tables = (world.status().get("sketch") or {}).get("tables", [])
    return len(tables) == len(world.config.tables) and bool(world.status().get("stream", {}).get("messages"))


_MESSAGES = 40
BOMB_BYTES = 96 * 2**20
"""Unpacked; a hundred kilobytes of it travel."""
_REQUEST_BYTES = 2**28


def malformed(world: ChaosWorld, chance: random.Random) -> Iterator[bytes]:
    """Other bytes, cut and changed messages of the ranks, and headers that promise too much."""
    genuine = [message for _, message in zip(range(8), world.log(), strict=False)]
    for _ in range(_MESSAGES):
        kind = chance.randrange(5)
        if kind == 0 or not genuine:
            yield chance.randbytes(chance.randrange(200))
        elif kind == 1:
            message = chance.choice(genuine)
            yield message[: chance.randrange(len(message))]
        elif kind == 2:
            header = json.dumps({"source_rank": 0, "event_time": 1.0, "body_bytes": 2**40, "tables": []}).encode()
            yield struct.pack("<4sI", tap_counts.MAGIC, chance.choice((len(header), 2**31))) + header
        elif kind == 3:
            yield b"\xff\xff\xff\xff" + struct.pack("<i", chance.choice((2**30, -1, 16))) + chance.randbytes(64)
        else:
            yield json.dumps({"table": "item", "rows": [1, 2], "row": 3}).encode()


def oversized(world: ChaosWorld, chance: random.Random) -> Iterator[bytes]:
    for _ in range(3):
        yield bytes(MAX_MESSAGE_BYTES + chance.randrange(1, MAX_MESSAGE_BYTES))


def bomb(world: ChaosWorld, chance: random.Random) -> Iterator[bytes]:
    """Zeros, which a producer compresses a thousandfold."""
    yield bytes(BOMB_BYTES)


def _poison(make: Callable[[ChaosWorld, random.Random], Iterator[bytes]], codec: str | None = None) -> Injection:
    def inject(world: ChaosWorld, chance: random.Random) -> str:
        producer = KafkaProducer(
            bootstrap_servers=world.broker.bootstrap_servers, compression_type=codec, max_request_size=_REQUEST_BYTES,
        )  # fmt: skip
        messages = 0
        try:
            for message in make(world, chance):
                producer.send(TOPIC, message, partition=chance.randrange(PARTITIONS)).get(30)
                messages += 1
        finally:
            producer.close(10)
        world.steps_on(STEPS_DURING)
        return f"{messages} messages"

    return inject


def upgrade_daemon(world: ChaosWorld, chance: random.Random) -> str:
    """Another version continues from the state of the daemon before it, under the ranks that are there."""
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


def _other(world: ChaosWorld, server: ProcessServer) -> ProcessServer:
    return world.next_server if server is world.server else world.server


def _name(world: ChaosWorld, server: ProcessServer) -> str:
    return "this version" if server is world.server else "the next version"


OPERATIONS: dict[str, list[Injection]] = {
    "secret rotated": [rotate_secret],
    "table added, then removed": [add_table],
}
UPGRADES: dict[str, list[Injection]] = {"daemon upgraded": [upgrade_daemon], "ranks upgraded": [upgrade_ranks]}
POISON: dict[str, list[Injection]] = {
    "poison: malformed messages": [_poison(malformed)],
    "poison: oversized messages": [_poison(oversized)],
    "poison: compressed bomb": [_poison(bomb, "gzip")],
}
