"""The API of a daemon while another one leads."""

from __future__ import annotations

from flexd.api.errors import ProbeResult
from flexd.api.status import Status, base_status
from flexd.api.threads import threads_status
from flexd.config.model import Config
from flexd.core.errors import ApiError
from flexd.core.process_start import ProcessStart
from flexd.core.supervision import Supervisor
from flexd.daemon.active_daemon import InactiveDaemon
from flexd.ha.lease_renewer import LeaseRenewer


class Standby(InactiveDaemon):
    """Implements ``DaemonApi``: the status and the probes; every command is refused with the leader's name.

    Attributes:
        problem: reason why this daemon could not lead when it held the lease; empty if there is none.
    """

    def __init__(self, config: Config, renewer: LeaseRenewer, started: ProcessStart, supervisor: Supervisor) -> None:
        self._config = config
        self._renewer = renewer
        self._started = started
        self._supervisor = supervisor
        self.problem = ""

    @property
    def reason(self) -> str:
        """The leader, in words."""
        record = self._renewer.lease.last_record
        if record is None or not record.holder:
            return "standby: no daemon leads at present"
        return f"standby: {record.holder} leads (term {record.term})"

    def status(self) -> Status:
        base = base_status(self._config, self._started, self.health(), self.ready())
        return base.model_copy(update={"threads": threads_status(self._supervisor)})

    def health(self) -> ProbeResult:
        return ProbeResult(ok=True)

    def ready(self) -> ProbeResult:
        problems = [f"lease: {self._renewer.problem}"] if self._renewer.problem else []
        if self.problem:
            problems.append(f"could not lead: {self.problem}")
        return ProbeResult(ok=False, reasons=(self.reason, *problems, *self._supervisor.reasons()))

    def refusal(self) -> ApiError:
        return ApiError(self.reason, status=503, remedy="ask the daemon that leads")
