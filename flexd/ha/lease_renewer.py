"""The thread that renews a lease, or tries to acquire it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from flexd.core.errors import FlexdError
from flexd.ha.lease import Lease

_log = logging.getLogger(__name__)


class LeaseRenewer:
    """Acquires or renews the lease every ``renew_seconds`` until ``stop``. ``Lease.term`` shows whether it is held.

    A call to the store that hangs blocks this thread only: the lease then ends by the clock.
    """

    def __init__(self, lease: Lease, renew_seconds: float) -> None:
        self.lease = lease
        self._renew_seconds = renew_seconds
        self._stopping = threading.Event()
        self._not_before = 0.0
        self.failures = 0
        """Attempts that could not reach the store."""
        self.problem = ""
        """Why the newest attempt failed; empty if it succeeded."""
        self._thread = threading.Thread(target=self._run, name="flexd-lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def release_for(self, seconds: float) -> None:
        """Release the lease and do not acquire it for ``seconds``, because this process cannot lead at present."""
        self._not_before = time.monotonic() + seconds

    def stop(self, timeout_seconds: float) -> bool:
        """Release the lease and end the thread. Returns whether it ended within the deadline; if not, the lease ends by
        the clock."""
        self._stopping.set()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._once()
            if self._stopping.wait(self._renew_seconds):
                break
        self._try(self.lease.release)

    def _once(self) -> None:
        if time.monotonic() < self._not_before:
            self._try(self.lease.release)
        else:
            self._try(self.lease.acquire_or_renew)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            # The next attempt may succeed; if this thread ended, the lease would end as well.
            self.failures += 1
            text = str(error) if isinstance(error, FlexdError) else repr(error)
            if text != self.problem:
                _log.warning("lease: %s", text, exc_info=not isinstance(error, FlexdError))
            self.problem = text
        else:
            self.problem = ""
