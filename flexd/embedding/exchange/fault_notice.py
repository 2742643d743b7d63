"""Notices of a failed rank to ranks that wait for it in a collective, through the store of the process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist

FIRST_LOOK = timedelta(seconds=1)
"""Time in a collective after which a rank looks for a notice; equal to the time between looks."""
_STORE_SECONDS = 2.0
_MAX_CHARACTERS = 500
_numbers = count()


class FaultNotices:
    """Publishes an error of this rank, and finds those of others.

    Every rank of the default process group constructs it at the same point of the program: instances of equal number
    share a notice. Without a process group it does nothing. The store is only used by a rank that failed, and by a rank
    that has waited ``FIRST_LOOK`` in a collective.
    """

    def __init__(self) -> None:
        self._live = dist.is_available() and dist.is_initialized()
        self._key = f"flexd/fault/{next(_numbers)}" if self._live else ""
        self._request: threading.Thread | None = None

    def publish(self, rank: int, error: BaseException) -> None:
        """Let the other ranks know why this one cannot continue. The first notice of a job stays."""
        lines = str(error).strip().splitlines() or [""]
        notice = f"rank {rank}: {type(error).__name__}: {lines[0][:_MAX_CHARACTERS]}"
        self._bounded(lambda store: store.compare_set(self._key, "", notice))

    def find(self) -> str | None:
        """Return the notice of a rank that failed, or None."""

        def read(store: torch._C._distributed_c10d.Store) -> bytes | None:
            return store.get(self._key) if store.check([self._key]) else None

        notice = self._bounded(read)
        return None if notice is None else notice.decode()

    def _bounded(self, request: Callable[[torch._C._distributed_c10d.Store], bytes | None]) -> bytes | None:
        """Return the result of a request to the store; None if it fails or takes long.

        The host of the store may be the rank that has died or stopped, and requests have no deadline of their own.
        """
        if not self._live or (self._request is not None and self._request.is_alive()):
            return None
        results: list[bytes | None] = []

        def run() -> None:
            try:
                results.append(request(dist.distributed_c10d._get_default_store()))
            except Exception:  # the error of the collective itself is then all that is known
                results.append(None)

        self._request = threading.Thread(target=run, name="flexd-fault-notice", daemon=True)
        self._request.start()
        self._request.join(_STORE_SECONDS)
        return results[0] if results else None
