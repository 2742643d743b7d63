"""Mappings that are guessed from events of many features. Others: tests/cli/test_stream_command.py."""

import json
import random
from typing import Any

import pytest

from flexd.stream.formats import JsonReader
from flexd.stream.inspection import guess, read_fields
from flexd.stream.types import StreamMessage


def event(n: int, draw: random.Random) -> dict[str, Any]:
    return {
        "lists": {"label": n % 2, "timestamp": 1_780_000_000 + n, "dense": [0.5, 0.1], "sparse": {
            "user_id": [draw.randrange(90)], "item_id": [draw.randrange(900)],
            "cat": [draw.randrange(50) for _ in range(n % 4)]}},
        "flat": {"event_id": n, "user_id": draw.randrange(90), "item_id": draw.randrange(900), "price": n % 7,
                 "shop_id": draw.randrange(30), "behaviour": "pv", "ts": 1_780_000_000 + n},
        "numbered": {"label": n % 2, "I1": draw.randrange(40), "I2": draw.randrange(40),
                     "C1": f"{draw.randrange(500) * 2654435761 % 2**32:08x}", "C2": f"{draw.randrange(9):08x}"},
        "short": {"u": draw.randrange(2**60), "i": [draw.randrange(2**60) for _ in range(3)], "t": 1_780_000_000 + n},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "tables", "time"),
    [
        ("lists", {"item": "$.sparse.item_id[*]", "user": "$.sparse.user_id[*]", "cat": "$.sparse.cat[*]"},
         "$.timestamp"),
        ("flat", {"item": "$.item_id", "shop": "$.shop_id", "user": "$.user_id"}, "$.ts"),
        ("numbered", {"c1": "$.C1", "c2": "$.C2"}, None),
        ("short", {"i": "$.i[*]"}, "$.t"),
    ],
)  # fmt: skip
def test_each_feature_of_an_event_is_a_table(shape: str, tables: dict[str, str], time: str | None) -> None:
    draw = random.Random(5)
    payloads = [json.dumps(event(n, draw)[shape]).encode() for n in range(300)]
    found = guess(read_fields([StreamMessage("t/0", n, each) for n, each in enumerate(payloads)], JsonReader()))
    assert (found.mapping["table"], found.mapping.get("time")) == (tables, time)
