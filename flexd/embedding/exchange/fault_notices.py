"""Notices of ranks in the store of the process group: one cannot continue, waits, has left, or has come to a call.

No collective carries them, so they reach ranks that wait in one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flexd.core.errors import CollectiveError

_STORE_SECONDS = 2.0
Store = torch._C._distributed_c10d.Store
Result = TypeVar("Result")


class BoundedStore:
    """One request at a time. The host of the store may be the rank that has died or stopped, and requests have no
    deadline of their own."""

    def __init__(self) -> None:
        self.live = dist.is_available() and dist.is_initialized()
        self._request: threading.Thread | None = None

    def request(self, request: Callable[[Store], Result]) -> Result | None:
        """Return the result of a request to the store; None if it fails, takes long, or there is no process group."""
        if not self.live or (self._request is not None and self._request.is_alive()):
            return None
        results: list[Result] = []

        def run() -> None:
            try:
                results.append(request(dist.distributed_c10d._get_default_store()))
            except Exception:  # the error of the collective itself is then all that is known
                results.clear()

        self._request = threading.Thread(target=run, name="flexd-store-request", daemon=True)
        self._request.start()
        self._request.join(_STORE_SECONDS)
        return results[0] if results else None


_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.002, 0.5
FIRST_LOOK = timedelta(seconds=1)
"""Time in a collective after which a rank looks for a notice; equal to the time between looks."""
_MAX_CHARACTERS = 500
_numbers = count()


class FaultNotices:
    """Publishes an error of this rank, and finds those of others.

    Every rank of the default process group constructs it at the same point of the program: instances of equal number
    share a notice. Without a process group it does nothing. The store is only used by a rank that failed, and by a rank
    that has waited ``FIRST_LOOK`` in a collective.
    """

    def __init__(self) -> None:
        self._store = BoundedStore()
        self.live = self._store.live
        """True if there are other ranks to reach."""
        self.number = next(_numbers)
        self._key = f"flexd/fault/{self.number}" if self.live else ""
        self._meetings = 0
        self.issued: dict[str, int] = {}
        """Collectives of this rank so far, by group."""

    def publish(self, rank: int, error: BaseException) -> bool:
        """Let the other ranks know why this one cannot continue. The first notice of a job stays.

        Returns:
            Whether the store has a notice now.
        """
        lines = str(error).strip().splitlines() or [""]
        notice = f"rank {rank}: {type(error).__name__}: {lines[0][:_MAX_CHARACTERS]}"
        return self._store.request(lambda store: store.compare_set(self._key, "", notice)) is not None

    def named_barrier(self, rank: int, world_size: int, what: str, timeout_seconds: float) -> None:
        """Wait until all ranks are in this call, at a barrier of its own in the store.

        Args:
            what: the call that ranks make here, for the error.

        Raises:
            CollectiveError: a rank did not come within the deadline, or had an error.
        """
        self._meetings += 1
        key = f"{self._key}/meeting/{self._meetings}"
        if self._arrive(key, rank, world_size, time.monotonic() + timeout_seconds, what):
            return
        missing = self._store.request(
            lambda requested: [other for other in range(world_size) if not requested.check([f"{key}/{other}"])]
        )
        named = "ranks that the store of rank 0 does not name" if not missing else f"ranks {missing}"
        raise CollectiveError(
            f"rank {rank}: {what}: {named} did not call it within {timeout_seconds:.0f} s",
            remedy="they have died, hang, or run other code: see their logs; if they are only slow, give "
            "init_process_group a longer timeout",
        )

    def wait_for_all(self, rank: int, world_size: int, what: str, deadline: float) -> bool:
        """Wait until all ranks have made a call that is not collective; return whether they have.

        Args:
            what: the call; after a further one of this name nothing is waited for.
            deadline: by ``time.monotonic``. Without a process group nothing is waited for.
        """
        return self.live and dist.is_initialized() and self._arrive(f"{self._key}/{what}", rank, world_size, deadline)

    def _arrive(self, key: str, rank: int, world_size: int, deadline: float, what: str = "") -> bool:
        """Wait at a barrier in the store until the deadline; return whether all ranks have come.

        Raises:
            CollectiveError: a rank had an error, if the barrier is of a call, ``what``.
        """
        if world_size == 1:
            return True
        store = self._store

        def arrive(requested: Store) -> None:
            requested.set(f"{key}/{rank}", "1")
            if requested.add(f"{key}/arrived", 1) == world_size:
                requested.set(f"{key}/all", "1")

        pause = _FIRST_POLL_SECONDS
        store.request(arrive)
        while not store.request(lambda requested: requested.check([f"{key}/all"])):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            if what and pause == _LAST_POLL_SECONDS and (notice := self.find()) is not None:
                raise CollectiveError(
                    f"rank {rank}: {what}: {notice}", remedy="see the log of the rank named last, then restart the job"
                )
            pause = min(2 * pause, _LAST_POLL_SECONDS)
        return True

    def exchange_waits(self, rank: int, wait: object, others: Sequence[int] = ()) -> dict[int, Any] | None:
        """Publish in what this rank waits, as JSON, and return what ``others`` have published; None if the store cannot
        be reached. With None in place of a wait this rank waits no more."""
        key = f"{self._key}/wait"

        def run(store: Store) -> dict[int, Any]:
            if wait is None:
                store.delete_key(f"{key}/{rank}")
            else:
                store.set(f"{key}/{rank}", json.dumps(wait))
            present = [other for other in others if store.check([f"{key}/{other}"])]
            return {other: json.loads(store.get(f"{key}/{other}")) for other in present}

        return self._store.request(run)

    def leave(self, rank: int, why: str) -> None:
        """Publish that this rank makes no call any more.

        Args:
            why: as the predicate of a sentence.
        """
        self.exchange_waits(rank, {"doing": why, "issued": dict(self.issued), "left": True})

    def find(self) -> str | None:
        """Return the notice of a rank that failed, or None."""

        def read(store: Store) -> bytes | None:
            return store.get(self._key) if store.check([self._key]) else None

        notice = self._store.request(read)
        return None if notice is None else notice.decode()
