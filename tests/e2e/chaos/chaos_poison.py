"""Poison on the stream: messages that no publisher of flexd writes, among those of the ranks."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator

from kafka import KafkaProducer

from flexd.core import tap_counts
from tests.e2e.chaos.chaos_faults import STEPS_DURING, Injection
from tests.e2e.chaos.chaos_world import MAX_MESSAGE_BYTES, PARTITIONS, TOPIC, ChaosWorld

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


def kinds() -> dict[str, list[Injection]]:
    return {
        "poison: malformed messages": [_poison(malformed)],
        "poison: oversized messages": [_poison(oversized)],
        "poison: compressed bomb": [_poison(bomb, "gzip")],
    }
