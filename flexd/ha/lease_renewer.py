"""The thread that renews a lease, or tries to acquire it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from flexd.core.errors import FlexdError
from flexd.core.fault_points import fault_point
from flexd.core.supervision import Supervisor
from flexd.ha.lease import Lease

_log = logging.getLogger(__name__)


class LeaseRenewer:
    """Acquires or renews the lease every ``renew_seconds`` until ``stop``. ``Lease.term`` shows whether it is held.

    A call to the store that hangs blocks this thread only: the lease then ends by the clock.
    """

    def __init__(self, lease: Lease, renew_seconds: float, supervisor: Supervisor | None = None) -> None:
        self.lease = lease
        self._renew_seconds = renew_seconds
        self._stopping = threading.Event()
        self._not_before = 0.0
        self.failures = 0
        """Attempts that could not reach the store."""
        self.problem = ""
        """Why the newest attempt failed; empty if it succeeded."""
        supervisor = supervisor or Supervisor()
        self._watch = supervisor.watch("flexd-lease")
        self._thread = supervisor.thread("flexd-lease", self._run, self._stopping, self._release)

    def start(self) -> None:
        self._thread.start()

    def release_for(self, seconds: float) -> None:
        """Release the lease and do not acquire it for ``seconds``, because this process cannot lead at present."""
        self._not_before = time.monotonic() + seconds

    def stop(self, timeout_seconds: float) -> bool:
        """Release the lease and end the thread. Returns whether it ended within the deadline; if not, the lease ends by
        the clock."""
        self._stopping.set()
        return self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while True:
            self._once()
            if self._stopping.wait(self._renew_seconds):
                return

    def _release(self) -> None:
        self._try(self.lease.release)

    def _once(self) -> None:
        if time.monotonic() < self._not_before:
            self._try(self.lease.release)
        else:
            self._try(self.lease.acquire_or_renew)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            fault_point("thread.lease")
            action()
        except Exception as error:
            # The next attempt, at the usual time, may succeed; if this thread waited longer, the lease would end.
            self.failures += 1
            text = str(error) if isinstance(error, FlexdError) else repr(error)
            if not isinstance(error, FlexdError):
                self._watch.fault(error)
            elif text != self.problem:
                _log.warning("lease: %s", text)
            self.problem = text
        else:
            self.problem = ""
            self._watch.progress()
