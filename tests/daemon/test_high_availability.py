"""Daemons in this process that share a lease in a directory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from flexd.config.load import parse_config
from flexd.config.model import Config
from flexd.core.errors import ConfigError, LeaseError
from flexd.daemon.config_file import ConfigFile
from flexd.daemon.high_availability import HighAvailabilityDaemon, make_lease_store
from flexd.ha.file_store import FileLeaseStore
from flexd.ha.lease import Lease
from flexd.ha.term_directories import open_term_directory
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.until import until

SECONDS = 1.5


def _config(directory: Path, **sections: Any) -> Config:
    return parse_config(
        {
            "job": "j",
            "tables": [{"name": "item", "rows": 3_000, "dim": 4}],
            "stream": {"source": {"kind": "synthetic", "accesses_per_second": 20_000}, "poll_seconds": 0.05},
            "sketch": {"memory_bytes": 2**22},
            "control": {"listen_port": 0},
            "server": {"port": 0},
            "state": {"dir": str(directory), "snapshot_interval_seconds": 3600.0},
            "high_availability": {
                "lease": {"kind": "file"}, "identity": "me", "duration_seconds": SECONDS, "renew_seconds": 0.1,
            },
            **sections,
        }
    )  # fmt: skip


class DaemonInThread:
    def __init__(self, config: Config, file: ConfigFile | None = None) -> None:
        self.daemon = HighAvailabilityDaemon(config, file)
        self.daemon.start()
        self.ended: bool | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.ended = self.daemon.run_until_stopped()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.daemon.address + path, timeout=20)

    def post(self, path: str, body: object = None) -> httpx.Response:
        return httpx.post(self.daemon.address + path, json=body, headers=COMMAND_HEADERS, timeout=20)

    def status(self) -> Any:
        return self.get("/v1/status").json()

    def stop(self) -> None:
        self.daemon.request_stop()
        self._thread.join(40)
        assert self.ended is True


@pytest.fixture
def start() -> Iterator[Callable[..., DaemonInThread]]:
    made: list[DaemonInThread] = []

    def make(config: Config, file: ConfigFile | None = None) -> DaemonInThread:
        made.append(DaemonInThread(config, file))
        return made[-1]

    yield make
    for running in made:
        running.stop()


def test_the_holder_of_the_lease_leads_and_releases_it_at_stop(
    start: Callable[[Config], DaemonInThread], tmp_path: Path
) -> None:
    one = start(_config(tmp_path))
    until(lambda: one.daemon.leads)
    two = start(_config(tmp_path))
    assert one.status()["leadership"]["role"] == "leader"
    shown = two.status()
    assert shown["leadership"]["role"] == "standby"
    until(lambda: (two.status()["leadership"]["holder"] or "").startswith("me/"))
    assert shown["ready"] is False
    asked = [two.post("/v1/plan"), two.post("/v1/explain", {"table": "item"}), two.post("/v1/rows", {"table": "item"})]
    for refused in (*asked, *(two.get(f"/v1/{name}") for name in ("tables", "proposals", "throttle"))):
        path = refused.request.url.path
        assert refused.status_code == 503, path
        assert "standby" in refused.json()["error"]["message"]
    assert (two.get("/healthz").status_code, two.get("/readyz").status_code) == (200, 503)
    until(lambda: one.status()["stream"]["accesses"] > 1_000)
    one.stop()
    until(lambda: two.daemon.leads)
    assert two.status()["leadership"]["term"] == 2
    assert sorted(path.name for path in tmp_path.glob("term-*")) == ["term-0000000001", "term-0000000002"]
    assert list((tmp_path / "term-0000000002" / "snapshots").glob("*.flexd")), "it continues from the last snapshot"
    page = two.get("/metrics").text
    assert "flexd_leading 1.0" in page
    assert "flexd_lease_term 2.0" in page


@pytest.mark.parametrize("shared", [True, False])
def test_pause_and_throttle_hold_under_the_next_leader_of_the_same_directory(
    start: Callable[[Config], DaemonInThread], tmp_path: Path, shared: bool
) -> None:
    def member(directory: Path) -> DaemonInThread:
        lease = {"kind": "file", "path": str(tmp_path / "lease")}
        settings = {"lease": lease, "identity": "me", "duration_seconds": SECONDS, "renew_seconds": 0.1}
        return start(_config(directory, high_availability=settings))

    one = member(tmp_path / "one")
    until(lambda: one.daemon.leads)
    two = member(tmp_path / ("one" if shared else "two"))
    for path, body in (("pause", {"reason": "night"}), ("throttle", {"bytes_per_step": 5_000, "reason": "careful"})):
        assert one.post(f"/v1/{path}", body).is_success, path
    one.stop()
    until(lambda: two.daemon.leads)
    status = two.status()
    assert (status["paused"], status["pause_reason"]) == ((True, "night") if shared else (False, None))
    assert status["throttle"]["bytes_per_step"] == (5_000 if shared else None)
    actions = [each["kind"] for each in two.get("/v1/migrations").json()["actions"]]
    assert actions == (["throttle", "pause"] if shared else [])


@pytest.mark.parametrize("leads", [True, False])
def test_both_roles_preview_a_reload_and_refuse_unknown_tables(
    start: Callable[..., DaemonInThread], tmp_path: Path, leads: bool
) -> None:
    config = _config(tmp_path)
    if not leads:
        store = FileLeaseStore(tmp_path / "lease")
        assert store.compare_and_set(store.read(), "other", 1, 3600.0) is not None
    path = tmp_path / "flexd.yaml"
    written = config.model_dump(mode="json")

    def write(**sections: Any) -> None:
        path.write_text(yaml.safe_dump({**written, **sections}))

    write(shutdown_seconds=7.0)
    running = start(config, ConfigFile(config, path, {}))
    until(lambda: running.daemon.leads is leads and running.status()["leadership"]["holder"] is not None)
    answer = running.post("/v1/config/reload/preview")
    assert (answer.status_code, answer.json()["applied"]) == (200, ["shutdown_seconds"]), answer.text
    write(planner={"pins": [{"table": "nothing", "tier": "NODE"}]})
    refused = running.post("/v1/config/reload/preview")
    assert (refused.status_code, "planner.pins[0].table" in refused.text) == (422, True), refused.text


def test_a_leader_without_its_lease_becomes_a_stand_by(
    start: Callable[[Config], DaemonInThread], tmp_path: Path
) -> None:
    running = start(_config(tmp_path))
    until(lambda: running.daemon.leads)
    thief = FileLeaseStore(tmp_path / "lease")

    def steal() -> bool:
        seen = thief.read()
        return thief.compare_and_set(seen, "thief", 7, SECONDS) is not None

    until(steal)
    until(lambda: not running.daemon.leads)
    shown = running.status()["leadership"]
    assert (shown["role"], shown["leadership_losses"]) == ("standby", 1)
    until(lambda: running.daemon.leads)
    assert running.status()["leadership"]["term"] == 8, "after the lease of the thief has expired"


def test_a_lease_that_cannot_be_renewed_expires(
    start: Callable[[Config], DaemonInThread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(_config(tmp_path))
    until(lambda: running.daemon.leads)

    def broken(*_: object) -> None:
        raise LeaseError("the volume is gone")

    monkeypatch.setattr(FileLeaseStore, "compare_and_set", broken)
    until(lambda: not running.daemon.leads)
    assert running.status()["leadership"]["problem"] == "the volume is gone"
    assert any("the volume is gone" in reason for reason in running.get("/readyz").json()["reasons"])
    monkeypatch.undo()
    until(lambda: running.daemon.leads)
    assert running.status()["leadership"]["term"] == 2


def test_a_daemon_that_cannot_lead_releases_the_lease(
    start: Callable[[Config], DaemonInThread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "plans.jsonl").write_text("{}\n")
    with monkeypatch.context() as patched:
        patched.setattr("flexd.ha.term_directories.shutil.copyfileobj", full)
        running = start(_config(tmp_path))
        until(lambda: "No space left" in (running.status()["leadership"]["problem"] or ""))
        assert not running.daemon.leads
        other = Lease(FileLeaseStore(tmp_path / "lease"), "other", SECONDS)
        until(other.acquire_or_renew)
    assert running.get("/healthz").status_code == 200


def test_terms_continue_from_the_state_directory(start: Callable[[Config], DaemonInThread], tmp_path: Path) -> None:
    open_term_directory(tmp_path, 41)
    running = start(_config(tmp_path))
    until(lambda: running.daemon.leads)
    assert running.status()["leadership"]["term"] == 42


def test_without_a_lease_there_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kind: none"):
        make_lease_store(_config(tmp_path, high_availability={}))
