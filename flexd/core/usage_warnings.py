"""Usage warnings: mistakes of a trainer that flexd recognises, noted in a rank's process and reported to the daemon."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from flexd.core.bounds import Count, Longest, Name, UnixSeconds

# Characters of a text that are kept.
MAX_TEXT = 400


class UsageWarningKind(StrEnum):
    """Mistakes of a trainer."""

    # Tables or loaded values have other row counts than on another rank, or than the table.
    ROW_COUNTS = "row_counts"
    # The loop changed ids that ``flexd.prefetch`` had located, so that they were located again.
    CHANGED_IDS = "changed_ids"
    # ``state_dict()`` was called on some ranks only, or its part was dropped on some and written on others.
    PARTIAL_STATE_DICT = "partial_state_dict"
    # Ranks have other seeds, or gave other values for the same rows.
    DIFFERING_SEEDS = "differing_seeds"
    # The gradient of rows was given to ``torch.nn.utils.clip_grad_norm_``, which cannot compute its norm.
    CLIPPED_BY_TORCH = "clipped_by_torch"
    # A look-up of training had no backward pass before its step, and momentum or weight decay moved its rows.
    NO_BACKWARD = "no_backward"
    # The installed pyarrow does not load with the installed numpy.
    NUMPY = "numpy"


@dataclass(frozen=True)
class UsageWarningReport:
    """Warnings of one kind that one process of a rank has noted.

    Attributes:
        kind: value of ``UsageWarningKind``; a rank of another version may have others.
        count: since the process began.
        text: the newest message.
        first_unix_seconds: time of the first one, by which a daemon knows a process again.
    """

    kind: Name
    count: Count
    text: Annotated[str, Longest(MAX_TEXT)]
    first_unix_seconds: UnixSeconds


class UsageWarningLog:
    """Counts mistakes by kind. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: dict[UsageWarningKind, UsageWarningReport] = {}
        self._listeners: list[Callable[[], None]] = []

    def note(self, kind: UsageWarningKind, text: str) -> None:
        """Count a mistake, and call the listeners."""
        with self._lock:
            before = self._noted.get(kind)
            first = time.time() if before is None else before.first_unix_seconds
            count = 1 if before is None else before.count + 1
            self._noted[kind] = UsageWarningReport(kind.value, count, text[:MAX_TEXT], first)
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()

    def reports(self) -> tuple[UsageWarningReport, ...]:
        """Return what was noted, one report per kind."""
        with self._lock:
            return tuple(self._noted.values())

    def add_listener(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)


# Of this process.
USAGE_WARNINGS = UsageWarningLog()
