"""The loop of a daemon's process: tick, reload on request, and stop within the deadline."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod

from flexd.api.daemon import ReloadReport
from flexd.config.model import Config
from flexd.core.errors import FlexdError
from flexd.core.fast_start import ProcessStart
from flexd.core.supervision import Supervisor
from flexd.daemon.config_file import ConfigFile

TICK_SECONDS = 0.1


class DaemonLoop(ABC):
    """Call ``start``, then ``run_until_stopped``; ``request_stop`` from anywhere.

    Args:
        file: the file that the configuration was read from, for reloads.
        supervisor: of the process; records the faults of every thread.
    """

    def __init__(self, config: Config, file: ConfigFile | None, supervisor: Supervisor | None) -> None:
        self._config = config
        self._file = file or ConfigFile(config)
        self._started = ProcessStart()
        self.supervisor = supervisor or Supervisor()
        self._loop_watch = self.supervisor.watch("loop")
        # Looked at between two ticks. No ``threading.Event``: a signal handler that runs inside ``Event.wait``, which
        # holds the event's lock, would block for ever in ``Event.set``.
        self._stop_requested = self._reload_requested = False

    @abstractmethod
    def tick(self) -> None:
        """Run the periodic work. What it raises is recorded by the supervisor; the loop ticks on."""

    @abstractmethod
    def stop(self, seconds: float) -> bool:
        """Stop every part. Returns whether all ended within the deadline."""

    @abstractmethod
    def check(self, config: Config) -> None:
        """Raise FlexdError if ``apply_config`` would."""

    @abstractmethod
    def apply_config(self, config: Config) -> None:
        """Apply settings that differ from the current ones only in ``flexd.config.load.HOT_KEYS``.

        Raises:
            FlexdError: they name a table that there is not, or the like; nothing has changed.
        """

    @abstractmethod
    def record_reload(self, requested_by: str, reason: str, outcome: ReloadReport | FlexdError) -> None:
        """Record the outcome of a reload."""

    def request_stop(self) -> None:
        """Make ``run_until_stopped`` end within ``shutdown_seconds``. Returns at once; safe in signal handlers."""
        self._stop_requested = True

    def request_reload(self) -> None:
        """Make the loop reload the configuration file. Returns at once; safe in signal handlers."""
        self._reload_requested = True

    def run_until_stopped(self) -> bool:
        """Tick until a stop is requested or a thread cannot go on safely (``supervisor.fatal``), then stop.

        Returns whether every part ended within the deadline.
        """
        try:
            while not self._stop_requested and not self.supervisor.fatal:
                if self._reload_requested:
                    self._reload_requested = False
                    self._loop_watch.attempt(self._reload_quietly)
                self.tick()
                time.sleep(TICK_SECONDS)
        finally:
            ended = self.stop(self._config.shutdown_seconds)
        return ended

    def reload(self, reason: str = "", requested_by: str = "") -> ReloadReport:
        """Read the file again, apply its hot keys, and record the outcome. Raises FlexdError; nothing changes then."""
        try:
            report = self._file.reload(self.apply_config)
        except FlexdError as error:
            self.record_reload(requested_by, reason, error)
            raise
        self.record_reload(requested_by, reason, report)
        return report

    def preview_reload(self) -> ReloadReport:
        """Return what ``reload`` would do now. Changes nothing."""
        return self._file.preview(self.check)

    def _reload_quietly(self) -> None:
        with contextlib.suppress(FlexdError):  # It is logged and counted.
            self.reload(requested_by="SIGHUP")
