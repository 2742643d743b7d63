"""Points of a program that all ranks reach: a wait for the others that ends with the names of those that are missing.

A first collective on NCCL would wait inside the making of its communicator, and an error of it names every other rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from flexd.core.errors import CollectiveError
from flexd.embedding.exchange.bounded_store import BoundedStore, Store

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
