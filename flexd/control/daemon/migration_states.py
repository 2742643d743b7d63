"""The states of a migration and the table of the transitions between them.

::

    PENDING --start--> PUSHING --exhausted--> APPLYING --applied--> COMMITTED
       |                |   ^                    |
       |                |   `------voided--------'       (an epoch ended: chunks not agreed are pushed again)
       |                |                        |
       |                `--abort--> ABORTING <---'--stopped (every pushed chunk is applied or void)--> ABORTED
       |
       `-- supersede / abort / fail --> SUPERSEDED / ABORTED / FAILED   (PUSHING: supersede; all but final: fail)

A migration that ends early leaves a prefix of its delta applied, which is a valid placement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from flexd.core.errors import IllegalTransitionError


class MigrationState(Enum):
    PENDING = "pending"
    PUSHING = "pushing"
    APPLYING = "applying"
    COMMITTED = "committed"
    ABORTING = "aborting"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"
    FAILED = "failed"


class TransitionEvent(Enum):
    START = "start"
    EXHAUSTED = "exhausted"
    VOIDED = "voided"
    APPLIED = "applied"
    ABORT = "abort"
    STOPPED = "stopped"
    SUPERSEDE = "supersede"
    FAIL = "fail"


_S, _E = MigrationState, TransitionEvent

TRANSITIONS: Mapping[tuple[MigrationState, TransitionEvent], MigrationState] = MappingProxyType(
    {
        (_S.PENDING, _E.START): _S.PUSHING,
        (_S.PENDING, _E.SUPERSEDE): _S.SUPERSEDED,
        (_S.PENDING, _E.ABORT): _S.ABORTED,
        (_S.PENDING, _E.FAIL): _S.FAILED,
        (_S.PUSHING, _E.EXHAUSTED): _S.APPLYING,
        (_S.PUSHING, _E.SUPERSEDE): _S.SUPERSEDED,
        (_S.PUSHING, _E.ABORT): _S.ABORTING,
        (_S.PUSHING, _E.FAIL): _S.FAILED,
        (_S.APPLYING, _E.VOIDED): _S.PUSHING,
        (_S.APPLYING, _E.APPLIED): _S.COMMITTED,
        (_S.APPLYING, _E.ABORT): _S.ABORTING,
        (_S.APPLYING, _E.FAIL): _S.FAILED,
        (_S.ABORTING, _E.STOPPED): _S.ABORTED,
        (_S.ABORTING, _E.FAIL): _S.FAILED,
    }
)

FINAL_STATES = frozenset({_S.COMMITTED, _S.ABORTED, _S.SUPERSEDED, _S.FAILED})


def next_state(state: MigrationState, event: TransitionEvent, what: str = "migration") -> MigrationState:
    """Return the state after ``event``.

    Args:
        what: names the migration in the error.

    Raises:
        IllegalTransitionError: the table has no such transition.
    """
    after = TRANSITIONS.get((state, event))
    if after is None:
        raise IllegalTransitionError(f"{what}: no {event.value} in state {state.value}")
    return after


@dataclass(frozen=True)
class Transition:
    """One change of a migration's state, with its progress at that time.

    Attributes:
        number: 0 is the submission, which has no ``event`` and no state ``before``.
        unix_seconds: wall-clock time.
        rows_pushed, rows_applied: see ``MigrationProgress``.
        version: the highest placement version that the migration had pushed; 0 before its first chunk.
    """

    number: int
    unix_seconds: float
    event: TransitionEvent | None
    before: MigrationState | None
    after: MigrationState
    reason: str
    rows_pushed: int
    rows_applied: int
    version: int
