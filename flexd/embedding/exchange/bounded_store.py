"""Requests to the store of the default process group that end after a bounded time, and meetings of ranks there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

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


def meet(
    store: BoundedStore,
    key: str,
    rank: int,
    world_size: int,
    what: str,
    timeout_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait until every rank has called this with the same key.

    Args:
        key: unique in the job, equal on all ranks.
        what: the call that ranks make here, for the error.

    Raises:
        CollectiveError: a rank did not come within the deadline.
    """

    def arrive(requested: Store) -> None:
        requested.set(f"{key}/{rank}", "1")
        if requested.add(f"{key}/arrived", 1) == world_size:
            requested.set(f"{key}/all", "1")

    deadline, pause = clock() + timeout_seconds, _FIRST_POLL_SECONDS
    store.request(arrive)
    while not store.request(lambda requested: requested.check([f"{key}/all"])):
        if clock() >= deadline:
            missing = store.request(
                lambda requested: [other for other in range(world_size) if not requested.check([f"{key}/{other}"])]
            )
            named = "ranks that the store of rank 0 does not name" if not missing else f"ranks {missing}"
            raise CollectiveError(
                f"rank {rank}: {what}: {named} did not call it within {timeout_seconds:.0f} s",
                remedy="they have died, hang, or run other code: see their logs; if they are only slow, give "
                "init_process_group a longer timeout",
            )
        time.sleep(pause)
        pause = min(2 * pause, _LAST_POLL_SECONDS)
