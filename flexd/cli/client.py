"""Client of the daemon's admin API: every call has a deadline, every failure an error that names the address."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ValidationError

from flexd.api.abort import AbortPreview, AbortResult
from flexd.api.affinity import UserNodePage
from flexd.api.attempt import AttemptList, AttemptResult
from flexd.api.base import MAX_REASON_CHARACTERS, REQUEST_HEADER
from flexd.api.config import ConfigReport, ReloadReport
from flexd.api.errors import ErrorBody
from flexd.api.explanation import Explanation
from flexd.api.migration import MigrationDetail, MigrationList
from flexd.api.pause import PauseState
from flexd.api.plan import PlanReport
from flexd.api.planning import ProposalList
from flexd.api.rank import RankPage
from flexd.api.replan import ReplanResult
from flexd.api.status import Status
from flexd.api.table import HotRowPage, TableOrder, TablePage
from flexd.api.throttle import ThrottleStatus
from flexd.api.timeline import Timeline
from flexd.cli.credentials import CA_VARIABLE, Credentials
from flexd.cli.exit_codes import DaemonRefusedError, DaemonTimeoutError, DaemonUnreachableError
from flexd.core.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:9464"
URL_VARIABLE = "FLEXD_URL"
SOCKET_VARIABLE = "FLEXD_SOCKET"
CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 10.0
PLAN_SECONDS = 120.0
"""A plan over 10^9 rows takes seconds on a quiet machine; a busy one needs more."""
MAX_ANSWER_BYTES = 64 * 2**20
NO_CREDENTIALS = Credentials()

_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(frozen=True)
class DaemonAddress:
    """Address of the daemon: a base URL, or a unix socket."""

    url: str
    socket: Path | None = None

    def __str__(self) -> str:
        return f"unix socket {self.socket}" if self.socket is not None else self.url

    @staticmethod
    def choose(
        url: str | None, socket: Path | None, environ: Mapping[str, str], configured: DaemonAddress | None = None
    ) -> DaemonAddress:
        """Return the address of an option, else of a variable, else ``configured``, else ``DEFAULT_URL``.

        Raises:
            ConfigError: both options or both variables are given, or the URL is invalid.
        """
        if url is None and socket is None:
            url = environ.get(URL_VARIABLE) or None
            socket = Path(environ[SOCKET_VARIABLE]) if environ.get(SOCKET_VARIABLE) else None
        if url is not None and socket is not None:
            raise ConfigError("a URL and a socket of the daemon are given", remedy="give one of them")
        if socket is not None:
            return DaemonAddress("http://flexd", socket)
        if url is None and configured is not None:
            return configured
        # Imported here because it imports its own command line, which `flexd run` does not need.
        import httpx

        url = url or DEFAULT_URL
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"the daemon's URL {url!r}: {error}", remedy=f"such as {DEFAULT_URL}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"the daemon's URL {url!r} is not an http address", remedy=f"such as {DEFAULT_URL}")
        return DaemonAddress(url)


def _checked(reason: str) -> str:
    if len(reason) > MAX_REASON_CHARACTERS:
        raise ConfigError(
            f"the reason has {len(reason)} characters", remedy=f"at most {MAX_REASON_CHARACTERS} are recorded"
        )
    return reason


class DaemonClient:
    """One method for each command of the API.

    Each raises DaemonUnreachableError, DaemonRefusedError (the daemon's own message and remedy) or
    DaemonTimeoutError.
    """

    def __init__(self, address: DaemonAddress, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._address = address
        self._credentials = credentials

    def status(self) -> Status:
        return self._call("GET", "/v1/status", Status, ANSWER_SECONDS)

    def plan(self) -> PlanReport:
        return self._call("POST", "/v1/plan", PlanReport, PLAN_SECONDS)

    def explain(self, table: str, row: int | None, hottest: int) -> Explanation:
        body = {"table": table, "row": row, "hottest": hottest}
        return self._call("POST", "/v1/explain", Explanation, PLAN_SECONDS, body)

    def config(self) -> ConfigReport:
        return self._call("GET", "/v1/config", ConfigReport, ANSWER_SECONDS)

    def tables(self, offset: int, limit: int, order: TableOrder) -> TablePage:
        query = urlencode({"offset": offset, "limit": limit, "order": order})
        return self._call("GET", f"/v1/tables?{query}", TablePage, ANSWER_SECONDS)

    def rows(self, table: str, offset: int, limit: int) -> HotRowPage:
        body = {"table": table, "offset": offset, "limit": limit}
        return self._call("POST", "/v1/rows", HotRowPage, PLAN_SECONDS, body)

    def ranks(self, offset: int, limit: int) -> RankPage:
        query = urlencode({"offset": offset, "limit": limit})
        return self._call("GET", f"/v1/topology?{query}", RankPage, ANSWER_SECONDS)

    def timeline(self) -> Timeline:
        return self._call("GET", "/v1/timeline", Timeline, ANSWER_SECONDS)

    def proposals(self) -> ProposalList:
        return self._call("GET", "/v1/proposals", ProposalList, ANSWER_SECONDS)

    def proposal(self, plan_id: str) -> PlanReport:
        return self._call("GET", f"/v1/proposals/{quote(plan_id, safe='')}", PlanReport, ANSWER_SECONDS)

    def user_nodes(self, offset: int) -> UserNodePage:
        return self._call("GET", f"/v1/affinity/users?offset={offset}", UserNodePage, ANSWER_SECONDS)

    def apply(self, plan_id: str, reason: str, wait_seconds: float, *, force: bool, who: str) -> ReplanResult:
        body = {"reason": _checked(reason), "wait_seconds": wait_seconds, "force": force, "who": who}
        path = f"/v1/proposals/{quote(plan_id, safe='')}/apply"
        return self._call("POST", path, ReplanResult, PLAN_SECONDS + wait_seconds, body)

    def throttle(self) -> ThrottleStatus:
        return self._call("GET", "/v1/throttle", ThrottleStatus, ANSWER_SECONDS)

    def set_throttle(
        self, bytes_per_step: int | None, bytes_per_second: int | None, adaptive: bool | None, *, reason: str, who: str
    ) -> ThrottleStatus:
        body = {
            "bytes_per_step": bytes_per_step, "bytes_per_second": bytes_per_second, "adaptive": adaptive,
            "reason": _checked(reason), "who": who,
        }  # fmt: skip
        return self._call("POST", "/v1/throttle", ThrottleStatus, ANSWER_SECONDS, body)

    def migrations(self, limit: int, state: str | None) -> MigrationList:
        query = {"limit": str(limit)} | ({} if state is None else {"state": state})
        return self._call("GET", f"/v1/migrations?{urlencode(query)}", MigrationList, ANSWER_SECONDS)

    def migration(self, migration_id: str) -> MigrationDetail:
        return self._call("GET", f"/v1/migrations/{quote(migration_id, safe='')}", MigrationDetail, ANSWER_SECONDS)

    def abort(self, *, rollback: bool, reason: str, wait_seconds: float, who: str) -> AbortResult:
        body = {"rollback": rollback, "reason": _checked(reason), "wait_seconds": wait_seconds, "who": who}
        return self._call("POST", "/v1/abort", AbortResult, ANSWER_SECONDS + wait_seconds, body)

    def preview_abort(self, *, rollback: bool) -> AbortPreview:
        return self._call("POST", "/v1/abort/preview", AbortPreview, PLAN_SECONDS, {"rollback": rollback})

    def replan(self, reason: str, wait_seconds: float, *, force: bool = False, who: str = "") -> ReplanResult:
        body = {"reason": _checked(reason), "wait_seconds": wait_seconds, "force": force, "who": who}
        return self._call("POST", "/v1/replan", ReplanResult, PLAN_SECONDS + wait_seconds, body)

    def attempts(self) -> AttemptList:
        return self._call("GET", "/v1/attempts", AttemptList, ANSWER_SECONDS)

    def prefer_attempt(self, attempt: str, reason: str, who: str) -> AttemptResult:
        return self._attempt_command(attempt, "prefer", reason, who)

    def forget_attempt(self, attempt: str, reason: str, who: str) -> AttemptResult:
        return self._attempt_command(attempt, "forget", reason, who)

    def _attempt_command(self, attempt: str, verb: str, reason: str, who: str) -> AttemptResult:
        body = {"attempt": attempt, "reason": _checked(reason), "who": who}
        return self._call("POST", f"/v1/attempts/{verb}", AttemptResult, ANSWER_SECONDS, body)

    def pause(self, reason: str, who: str = "") -> PauseState:
        return self._call("POST", "/v1/pause", PauseState, ANSWER_SECONDS, {"reason": _checked(reason), "who": who})

    def resume(self, reason: str = "", who: str = "") -> PauseState:
        return self._call("POST", "/v1/resume", PauseState, ANSWER_SECONDS, {"reason": _checked(reason), "who": who})

    def reload(self, reason: str = "", who: str = "") -> ReloadReport:
        body = {"reason": _checked(reason), "who": who}
        return self._call("POST", "/v1/config/reload", ReloadReport, ANSWER_SECONDS, body)

    def preview_reload(self) -> ReloadReport:
        return self._call("POST", "/v1/config/reload/preview", ReloadReport, ANSWER_SECONDS)

    def _call(
        self, method: str, path: str, model: type[_Model], seconds: float, body: dict[str, Any] | None = None
    ) -> _Model:
        status, content = self._exchange(method, path, seconds, body)
        try:
            if status < 400:
                return model.model_validate_json(content)
            error = ErrorBody.model_validate_json(content).error
        except ValidationError as invalid:
            raise DaemonUnreachableError(
                f"{self._address} answered {method} {path} with status {status} and a body that is not flexd's",
                status=status,
                remedy="check that the address is a flexd daemon of this version",
            ) from invalid
        raise DaemonRefusedError(error.message, status=status, remedy=error.remedy)

    def _exchange(self, method: str, path: str, seconds: float, body: dict[str, Any] | None) -> tuple[int, bytes]:
        """Return (HTTP status, body) within ``seconds``."""
        import httpx

        deadline = time.monotonic() + seconds
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        # No proxies: the address is this machine, whatever proxies the environment configures.
        secured = self._address.url.startswith("https:")
        transport = None if self._address.socket is None else httpx.HTTPTransport(uds=str(self._address.socket))
        headers = self._credentials.headers(self._address.url, over_socket=self._address.socket is not None)
        headers[REQUEST_HEADER] = "flexd"
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            with (
                httpx.Client(
                    base_url=self._address.url,
                    transport=transport,
                    timeout=timeout,
                    trust_env=False,
                    # Loading the CAs takes a while, and without TLS there is nothing to verify.
                    verify=self._credentials.context() if secured else False,
                ) as client,
                client.stream(
                    method,
                    path,
                    content=None if body is None else json.dumps(body),
                    headers=headers,
                ) as answer,
            ):
                parts: list[bytes] = []
                size = 0
                for part in answer.iter_bytes():
                    parts.append(part)
                    size += len(part)
                    if size > MAX_ANSWER_BYTES:
                        raise DaemonUnreachableError(
                            f"{self._address} sends an endless response to {path}",
                            remedy="check that the address is a flexd daemon",
                        )
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout("deadline passed")
                return answer.status_code, b"".join(parts)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise DaemonUnreachableError(
                f"no flexd daemon at {self._address}: {error}",
                remedy=f"name a file with the CA of its certificate in {CA_VARIABLE}"
                if "CERTIFICATE" in str(error).upper()
                else f"start it (flexd run -c FILE), or name its address with --url, --socket, {URL_VARIABLE} or "
                f"{SOCKET_VARIABLE}",
            ) from error
        except httpx.TimeoutException as error:
            raise DaemonTimeoutError(
                f"the daemon at {self._address} did not answer {method} {path} within {seconds:g} s",
                remedy="see its log, and flexd status",
            ) from error
        except httpx.TransportError as error:
            raise DaemonUnreachableError(
                f"the connection to {self._address} broke: {error or type(error).__name__}",
                remedy="see whether the daemon has stopped",
            ) from error
