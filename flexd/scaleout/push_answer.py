"""The leader's answer to a count delta, as JSON. Unknown fields are ignored; all but the first two may be missing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from flexd.core.errors import ConfigError, ScaleOutError
from flexd.core.keyspace import TableSpec, table_from_document

Outcome = Literal["accepted", "repeated", "refused"]
MAX_ANSWER_BYTES = 32 * 2**20
_OUTCOMES = ("accepted", "repeated", "refused")
_MAX_TEXT_CHARS = 2000


@dataclass(frozen=True)
class PushAnswer:
    """The leader's verdict on one count delta.

    Attributes:
        outcome: ``accepted``: counted now. ``repeated``: its positions show that these messages are counted already.
            ``refused``: nothing of it was counted.
        reason: label of a refusal. ``position``: the delta does not begin at the leader's positions; the follower
            returns to these and counts again. Every other reason needs an operator (``message``): the follower keeps
            the delta and sends it again.
        positions: the leader's position in every partition that it has counted.
        durable: the positions in the leader's newest snapshot.
        clock: state of the leader's event clock (``SketchSet.clock``).
        message: one sentence for the operator.
        tables: the leader's, in its order, if ``reason`` is ``other_tables``. Empty otherwise, and of an older leader.
    """

    outcome: Outcome
    positions: Mapping[str, int]
    durable: Mapping[str, int] = field(default_factory=dict)
    clock: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    message: str = ""
    tables: tuple[TableSpec, ...] = ()


def encode(answer: PushAnswer) -> bytes:
    return json.dumps(asdict(answer)).encode()


def decode(data: bytes) -> PushAnswer:
    """Raises ScaleOutError (``malformed``) if it is not what ``encode`` gives."""
    try:
        document = json.loads(data)
        if document["outcome"] not in _OUTCOMES:
            raise ValueError(f"outcome {str(document['outcome'])[:40]}")
        return PushAnswer(
            outcome=document["outcome"],
            positions=_positions(document["positions"]),
            durable=_positions(document.get("durable", {})),
            clock=dict(document.get("clock", {})),
            reason=str(document.get("reason", ""))[:_MAX_TEXT_CHARS],
            message=str(document.get("message", ""))[:_MAX_TEXT_CHARS],
            tables=tuple(table_from_document(entry) for entry in document.get("tables", [])),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        raise ScaleOutError(f"malformed answer of the leader: {error!r}"[:500], reason="malformed") from error


def _positions(value: Mapping[str, Any]) -> dict[str, int]:
    positions = {}
    for partition, position in value.items():
        if not isinstance(position, int) or isinstance(position, bool) or position < 0:
            raise ValueError(f"position {str(position)[:40]}")
        positions[str(partition)] = position
    return positions
