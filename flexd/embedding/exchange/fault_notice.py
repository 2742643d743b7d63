"""Notices of a failed rank to ranks that wait for it in a collective, through the store of the process group."""

from __future__ import annotations

from datetime import timedelta
from itertools import count

from flexd.embedding.exchange.bounded_store import BoundedStore, Store, meet

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
        self._key = f"flexd/fault/{next(_numbers)}" if self._store.live else ""
        self._meetings = 0

    @property
    def live(self) -> bool:
        """True if there are other ranks to reach."""
        return self._store.live

    def publish(self, rank: int, error: BaseException) -> bool:
        """Let the other ranks know why this one cannot continue. The first notice of a job stays.

        Returns:
            Whether the store has a notice now.
        """
        lines = str(error).strip().splitlines() or [""]
        notice = f"rank {rank}: {type(error).__name__}: {lines[0][:_MAX_CHARACTERS]}"
        return self._store.request(lambda store: store.compare_set(self._key, "", notice)) is not None

    def meet(self, rank: int, world_size: int, what: str, timeout_seconds: float) -> None:
        """Wait until all ranks are in this call; see ``meeting.meet``."""
        self._meetings += 1
        if world_size > 1:
            meet(self._store, f"{self._key}/meeting/{self._meetings}", rank, world_size, what, timeout_seconds)

    def find(self) -> str | None:
        """Return the notice of a rank that failed, or None."""

        def read(store: Store) -> bytes | None:
            return store.get(self._key) if store.check([self._key]) else None

        notice = self._store.request(read)
        return None if notice is None else notice.decode()
