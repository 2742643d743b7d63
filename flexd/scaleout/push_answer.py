"""What the leader answers to a delta."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from flexd.core.errors import ScaleOutError

Outcome = Literal["accepted", "repeated", "refused"]
MAX_ANSWER_BYTES = 32 * 2**20
_OUTCOMES = ("accepted", "repeated", "refused")
_MAX_TEXT_CHARS = 2000


@dataclass(frozen=True)
class Answer:
    """The leader's word on one delta.

    Attributes:
        outcome: ``accepted``: counted now. ``repeated``: its positions say that these messages are counted already.
            ``refused``: nothing of it was counted.
        reason: of a refusal. ``position``: it does not begin where the leader stands; the follower goes to the
            leader's positions and counts again. Anything else needs a person (``message``): the follower keeps the
            delta and offers it again.
        positions: the leader's, of every partition it has counted anything of.
        durable: of these, what the leader's newest snapshot holds.
        clock: of the leader's counters (``SketchSet.clock``).
        message: one sentence for people.
    """

    outcome: Outcome
    positions: Mapping[str, int]
    durable: Mapping[str, int] = field(default_factory=dict)
    clock: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    message: str = ""


def encode(answer: Answer) -> bytes:
    return json.dumps(asdict(answer)).encode()


def decode(data: bytes) -> Answer:
    """Raises ScaleOutError (``malformed``) if it is not what ``encode`` gives."""
    try:
        document = json.loads(data)
        if document["outcome"] not in _OUTCOMES:
            raise ValueError(f"outcome {str(document['outcome'])[:40]}")
        return Answer(
            outcome=document["outcome"],
            positions=_positions(document["positions"]),
            durable=_positions(document["durable"]),
            clock=dict(document["clock"]),
            reason=str(document["reason"])[:_MAX_TEXT_CHARS],
            message=str(document["message"])[:_MAX_TEXT_CHARS],
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ScaleOutError(f"malformed answer of the leader: {error!r}"[:500], reason="malformed") from error


def _positions(value: Mapping[str, Any]) -> dict[str, int]:
    positions = {}
    for partition, position in value.items():
        if not isinstance(position, int) or isinstance(position, bool) or position < 0:
            raise ValueError(f"position {str(position)[:40]}")
        positions[str(partition)] = position
    return positions
