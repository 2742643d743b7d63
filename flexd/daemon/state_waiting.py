"""A daemon that waits for an operator, because it cannot continue from the saved state (``state.on_unusable: wait``).

It serves the API, so that a pod is not restarted over and over and an operator can run ``flexd state`` in it. It does
not hold the lock of the state directory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from flexd.api.base import ProbeResult
from flexd.api.status import Status, base_status
from flexd.config.model import Config
from flexd.core.errors import ApiError, StateLockedError, StateVersionError, UnusableStateError
from flexd.core.fast_start import ProcessStart
from flexd.core.signal_flag import SignalFlag
from flexd.core.supervision import Supervisor
from flexd.daemon.config_file import ConfigFile
from flexd.daemon.loop import TICK_SECONDS
from flexd.daemon.service import Daemon
from flexd.daemon.tables_from_ranks import InactiveDaemon, TablesFromRanks
from flexd.server.http import DaemonServer
from flexd.server.metrics import Metrics

logger = logging.getLogger("flexd")

UNUSABLE = (UnusableStateError, StateVersionError)
LOOK_SECONDS = 1.0


class WaitingDaemon(InactiveDaemon):
    """Implements ``DaemonApi``: the status and the probes. Becomes a ``Daemon`` once the state can be used.

    Call ``start``, then ``run_until_stopped``; ``request_stop`` from anywhere.

    Args:
        make: makes the daemon.
    """

    def __init__(
        self,
        config: Config,
        file: ConfigFile,
        problem: str,
        make: Callable[..., Daemon | TablesFromRanks] = Daemon,
    ) -> None:
        self._make = make
        self._config = config
        self._file = file
        self._problem = problem
        self._started = ProcessStart()
        self.supervisor = Supervisor()
        self._stopping, self._reload_requested = SignalFlag(), SignalFlag()
        self._server = DaemonServer(self, Metrics(self), config.server, self.supervisor)
        self._daemon: Daemon | TablesFromRanks | None = None

    def start(self) -> None:
        """Serve the API. Raises ApiError if an address is taken."""
        self._server.start()
        logger.error("flexd waits: %s", self._problem)

    def request_stop(self) -> None:
        """Make ``run_until_stopped`` end. Returns at once; safe in signal handlers."""
        self._stopping.set()
        if self._daemon is not None:
            self._daemon.request_stop()

    def request_reload(self) -> None:
        """Make the daemon reload the configuration file, if it runs already."""
        if self._daemon is not None:
            self._daemon.request_reload()

    def run_until_stopped(self) -> bool:
        """Wait until the state can be used, then run the daemon. Returns whether every part ended in time."""
        seen = _signature(self._config.state.dir)
        look_at = time.monotonic() + LOOK_SECONDS
        while not self._stopping.wait(TICK_SECONDS):
            if time.monotonic() < look_at:
                continue
            look_at = time.monotonic() + LOOK_SECONDS
            now = _signature(self._config.state.dir)
            if now != seen:
                seen = now
                daemon = self._try()
                if daemon is not None:
                    return self._run(daemon)
        return self._server.stop(self._config.shutdown_seconds)

    def _try(self) -> Daemon | TablesFromRanks | None:
        try:
            return self._make(self._config, file=self._file, supervisor=self.supervisor)
        except (*UNUSABLE, StateLockedError) as error:
            self._problem = str(error)
            logger.error("flexd waits: %s", self._problem)
            return None

    def _run(self, daemon: Daemon | TablesFromRanks) -> bool:
        # The addresses of the API must be free for the daemon.
        self._server.stop(self._config.shutdown_seconds)
        daemon.start()
        self._daemon = daemon
        if self._stopping.is_set():
            daemon.request_stop()
        return daemon.run_until_stopped()

    def status(self) -> Status:
        return base_status(self._config, self._started, self.health(), self.ready())

    def health(self) -> ProbeResult:
        return ProbeResult(ok=True)

    def ready(self) -> ProbeResult:
        return ProbeResult(ok=False, reasons=(f"state: {self._problem}",))

    def refusal(self) -> ApiError:
        return ApiError(f"waiting for the state: {self._problem}", status=503, remedy="run `flexd state show`")


def _signature(state_dir: Path) -> frozenset[tuple[str, int]]:
    """Return the files of the directory with the times of their last change: different after any change of them."""
    found = set()
    for path in (*state_dir.glob("*"), *state_dir.glob("*/*")):
        try:
            # The lock is touched by every attempt.
            if path.name != "lock":
                found.add((str(path), path.stat().st_mtime_ns))
        except OSError:
            continue
    return frozenset(found)
