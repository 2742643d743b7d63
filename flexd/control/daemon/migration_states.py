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
from enum import StrEnum
from types import MappingProxyType

from flexd.core.errors import IllegalTransitionError


class MigrationState(StrEnum):
    PENDING = "pending"
    PUSHING = "pushing"
    APPLYING = "applying"
    COMMITTED = "committed"
    ABORTING = "aborting"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"
    FAILED = "failed"


class TransitionEvent(StrEnum):
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
