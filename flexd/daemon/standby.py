"""What a daemon answers while another one leads."""

from __future__ import annotations

from typing import Any

from flexd import __version__
from flexd.api.errors import ProbeResult
from flexd.api.status import Status, StreamStatus
from flexd.config.model import Config
from flexd.core.errors import ApiError
from flexd.core.process_start import ProcessStart
from flexd.daemon.active_daemon import refusing
from flexd.ha.lease_renewer import LeaseRenewer
from flexd.server.figures import DaemonFigures


class Standby:
    """Implements ``DaemonApi``: the status and the probes; every other verb is refused with the leader's name."""

    def __init__(self, config: Config, renewer: LeaseRenewer, started: ProcessStart) -> None:
        self._config = config
        self._renewer = renewer
        self._started = started
        self.problem = ""
        """Why this daemon could not lead when it might have; empty if nothing is known."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(refusing(self._refusal), name)

    @property
    def reason(self) -> str:
        record = self._renewer.lease.last_record
        if record is None or not record.holder:
            return "standby: nobody leads at present"
        return f"standby: {record.holder} leads (term {record.term})"

    def status(self) -> Status:
        healthy, ready = self.health(), self.ready()
        return Status(
            job=self._config.job,
            version=__version__,
            uptime_seconds=self._started.uptime_seconds,
            healthy=healthy.ok,
            ready=ready.ok,
            reasons=(*healthy.reasons, *ready.reasons),
            stream=StreamStatus(source=self._config.stream.source.kind),
        )

    def figures(self) -> DaemonFigures:
        """For the metrics page."""
        return DaemonFigures(
            job=self._config.job, version=__version__, started_unix_seconds=self._started.unix_seconds, ready=False
        )

    def health(self) -> ProbeResult:
        return ProbeResult(ok=True)

    def ready(self) -> ProbeResult:
        problems = [f"lease: {self._renewer.problem}"] if self._renewer.problem else []
        if self.problem:
            problems.append(f"could not lead: {self.problem}")
        return ProbeResult(ok=False, reasons=(self.reason, *problems))

    def _refusal(self) -> ApiError:
        return ApiError(self.reason, status=503, remedy="ask the daemon that leads")
