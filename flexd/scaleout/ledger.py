"""The leader's positions: the only authority over what of the stream has been counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Literal

from flexd.scaleout.count_delta import Stretch
from flexd.stream.types import Message, Positions

Fit = Literal["fits", "repeated", "elsewhere"]


class Ledger:
    """How far each partition has been counted, as a ``Source`` of the leader's ingest that never delivers a message.

    In this shape the ordinary snapshot saves and restores the positions together with the counters, and tells which of
    them are durable (``commit``). Deltas must not be judged before ``open``: until then the snapshot's positions may
    not be here yet.

    Args:
        lag: messages that the followers have not read.
        problem: what is wrong with the followers as a whole, or None.
    """

    messages_lost = 0

    def __init__(self, lag: Callable[[], int] = lambda: 0, problem: Callable[[], str | None] = lambda: None) -> None:
        self._lag = lag
        self._problem = problem
        self._lock = threading.Lock()
        self._positions: Positions = {}
        self._durable: Positions = {}
        self._open = threading.Event()
        self._closed = threading.Event()

    @property
    def open(self) -> bool:
        """Whether the positions are the leader's: restored if there was a snapshot."""
        return self._open.is_set() and not self._closed.is_set()

    def judge(self, stretches: Mapping[str, Stretch]) -> Fit:
        """Whether a delta of these stretches may be counted.

        ``fits``: each begins where the ledger stands. ``repeated``: each ends there, so its messages are counted,
        whoever sent them. ``elsewhere``: anything else.
        """
        with self._lock:
            at = self._positions
            if all(at.get(name) == stretch.start for name, stretch in stretches.items()):
                return "fits"
            if all(at.get(name) == stretch.end for name, stretch in stretches.items()):
                return "repeated"
        return "elsewhere"

    def move(self, stretches: Mapping[str, Stretch]) -> None:
        """Stands at their ends from now on. Under the lock of the counts: a snapshot holds both or neither."""
        with self._lock:
            self._positions.update({name: stretch.end for name, stretch in stretches.items()})

    def durable(self) -> Positions:
        """Positions of the newest snapshot."""
        with self._lock:
            return dict(self._durable)

    @property
    def problem(self) -> str | None:
        return self._problem()

    def poll(self, timeout_seconds: float) -> list[Message]:
        """Never a message. The first call comes after the restoring of a snapshot, if there was one."""
        self._open.set()
        self._closed.wait(timeout_seconds)
        return []

    def restore(self, positions: Mapping[str, int]) -> None:
        with self._lock:
            self._positions = dict(positions)
            self._durable = dict(positions)

    def positions(self) -> Positions:
        with self._lock:
            return dict(self._positions)

    def lag(self) -> int:
        return self._lag()

    def commit(self, positions: Mapping[str, int]) -> str | None:
        with self._lock:
            self._durable = dict(positions)
        return None

    def close(self) -> None:
        self._closed.set()
