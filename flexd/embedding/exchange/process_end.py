"""Tells the other ranks when this process ends by an error outside the calls of a collection.

An error in the dense part of a model ends one rank only. The others find out when the connection to it closes, without
a cause, and on NCCL, or while a thread keeps the process alive, only at the timeout of the process group.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

import torch
import torch.distributed as dist

_c10d = torch._C._distributed_c10d
PUBLISH_SECONDS = 3.0
"""Limit of all notices of an ending process: the store may be gone already."""
HOST_SECONDS = 2.5
"""Time for which an ending process keeps the store that it hosts: two looks of a rank that waits."""


class Watched(Protocol):
    """What tells of an end while it is alive."""

    closed: bool
    """Nobody waits for this rank any more."""

    @property
    def used_by(self) -> threading.Thread | None:
        """Thread of the newest step, if it is known."""
        ...

    @property
    def in_step(self) -> bool:
        """A forward pass waits for its step, in which the other ranks wait for this one."""
        ...

    def publish(self, error: BaseException) -> bool:
        """Let the other ranks know; False if there is nobody to tell."""
        ...


class ProcessEnd:
    """Watches the process by ``sys.excepthook``, ``threading.excepthook`` and ``atexit``; hooks that were
    there run too.

    An error that the trainer catches, and ``os._exit``, are not seen.
    """

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._installed = False
        self._told = False

    def watch(self, watched: Watched) -> None:
        """Tell of an end of the process until ``watched`` is closed or gone."""
        self._watched.add(watched)
        if self._installed:
            return
        self._installed = True
        before, before_thread = sys.excepthook, threading.excepthook

        def of_process(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            before(kind, error, trace)
            self._tell(error, lambda _: True)

        def of_thread(given: threading.ExceptHookArgs) -> None:
            before_thread(given)
            error = given.exc_value
            if error is not None:
                self._tell(error, lambda watched: watched.used_by is given.thread)

        sys.excepthook, threading.excepthook = of_process, of_thread
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if not self._told:
            self._tell(RuntimeError("the process ended during a step"), lambda watched: watched.in_step)

    def _tell(self, error: BaseException, concerns: Callable[[Watched], bool]) -> None:
        deadline = time.monotonic() + PUBLISH_SECONDS
        for watched in list(self._watched):
            if not watched.closed and concerns(watched) and time.monotonic() < deadline:
                self._told |= watched.publish(error)
        if self._told and _hosts_store():
            time.sleep(HOST_SECONDS)


def _hosts_store() -> bool:
    """Return whether the store of the process group ends with this process, as far as is known."""
    try:
        store = dist.distributed_c10d._get_default_store()
        while isinstance(store, _c10d.PrefixStore):
            store = store.underlying_store
        of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return isinstance(store, _c10d.TCPStore) and dist.get_rank() == 0 and not of_launcher
    except (RuntimeError, ValueError):
        return False  # the process group is gone


PROCESS_END = ProcessEnd()
