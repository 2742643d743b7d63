"""Reloads of a changed configuration file: applied, refused, or pending a restart."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import yaml

from flexd.api import routes
from flexd.config.model import Config, parse_config
from flexd.core.errors import ConfigError, FlexdError, SnapshotError
from flexd.daemon import Daemon
from flexd.daemon.config_file import ConfigFile, control_options, make_source
from tests.daemon.conftest import DaemonOnFile, settings
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.certificates import Authority
from tests.support.until import until


@pytest.fixture
def job(tmp_path: Path, start: Callable[..., Any]) -> DaemonOnFile:
    job = DaemonOnFile(tmp_path)
    start(job.daemon)
    return job


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_a_preview_lists_the_keys_of_a_reload_and_applies_none(job: DaemonOnFile) -> None:
    job.write(planner={"min_samples": 5}, control={"listen_port": 0, "chunk_rows": 7})
    before, config = job.daemon.status().config, job.daemon.components.inspect.config().config
    preview = job.daemon.preview_reload()
    assert (preview.dry_run, preview.applied, preview.pending) == (
        True,
        ("planner.min_samples",),
        ("control.chunk_rows",),
    )
    assert [(each.key, each.before, each.after, each.needs_restart) for each in preview.changes] == [
        ("planner.min_samples", config["planner"]["min_samples"], 5, False),
        ("control.chunk_rows", 4096, 7, True),
    ]
    assert (job.daemon.status().config, job.daemon.components.inspect.config().config) == (before, config)
    answer = httpx.post(f"{job.daemon.address}/v1/config/reload/preview", headers=COMMAND_HEADERS)
    assert (answer.status_code, answer.json()["applied"]) == (200, ["planner.min_samples"])
    taken = job.daemon.call(routes.RELOAD)
    assert (taken.dry_run, taken.changes) == (False, preview.changes)
    assert [each.key for each in job.daemon.preview_reload().changes] == ["control.chunk_rows"]


def test_hot_keys_are_applied_at_once(job: DaemonOnFile) -> None:
    job.write(
        planner={"interval_seconds": 7.0, "min_samples": 5, "drift_threshold": 1.5},
        control={"listen_port": 0, "throttle": {"bytes_per_second": 5_000}, "chunk_rows": 7},
        log={"level": "error"},
        state={**job.settings["state"], "snapshot_interval_seconds": 0.2, "keep_snapshots": 9},
    )
    written = job.daemon.status().snapshot.written
    report = job.daemon.call(routes.RELOAD)
    assert set(report.applied) == {
        "planner.interval_seconds", "planner.min_samples", "planner.drift_threshold",
        "control.throttle.bytes_per_second", "log.level", "state.snapshot_interval_seconds", "state.keep_snapshots",
    }  # fmt: skip
    assert set(report.pending) == {"control.chunk_rows"}
    status = job.daemon.status()
    assert set(status.config.pending) == set(report.pending)
    assert (status.config.reloads["rejected"], status.config.problem) == (0, None)
    assert (status.drift.threshold, status.throttle.bytes_per_second) == (1.5, 5_000)
    assert logging.getLogger().level == logging.ERROR
    shown = job.daemon.components.inspect.config().config
    assert (shown["planner"]["min_samples"], shown["control"]["chunk_rows"]) == (5, 4096)
    assert 'flexd_config_reloads_total{outcome="applied"} 1.0' in httpx.get(f"{job.daemon.address}/metrics").text
    # The new interval starts after the wait that was running when it changed.
    job.daemon.components.ingestor.snapshots.request()
    until(lambda: job.daemon.status().snapshot.written >= written + 4, 30)

    job.write()
    back = job.daemon.call(routes.RELOAD)
    assert (set(back.applied), back.pending) == (set(report.applied), ())
    assert (job.daemon.status().config.pending, job.daemon.call(routes.RELOAD).applied) == ((), ())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"planner": {"interval_seconds": -1}}, "planner.interval_seconds"),
        ({"plannr": {}}, "plannr"),
        ({"planner": {"pins": [{"table": "nothing", "tier": "NODE"}]}, "log": {"level": "error"}}, "nothing"),
    ],
)
def test_a_bad_file_is_rejected_and_the_old_one_kept(job: DaemonOnFile, change: dict[str, Any], expected: str) -> None:
    before = job.daemon.components.inspect.config().config
    level = logging.getLogger().level
    job.write(**change)
    with pytest.raises(FlexdError, match=expected):
        job.daemon.call(routes.RELOAD)
    assert job.daemon.components.inspect.config().config == before
    assert logging.getLogger().level == level
    status = job.daemon.status().config
    assert status.reloads["rejected"] == 1
    assert expected in (status.problem or "")
    answer = httpx.post(f"{job.daemon.address}/v1/config/reload", headers=COMMAND_HEADERS)
    assert answer.status_code in (409, 422)
    assert expected in answer.json()["error"]["message"]
    job.path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        job.daemon.call(routes.RELOAD)
    job.write()
    job.daemon.call(routes.RELOAD)
    assert job.daemon.status().config.problem is None
    assert job.daemon.status().config.reloads["rejected"] == 3


def test_a_refused_reload_keeps_the_running_configuration(tmp_path: Path) -> None:
    """Hot keys may fit the rest of their file and contradict keys that are still running."""
    path = tmp_path / "flexd.yaml"
    path.write_text(yaml.safe_dump({**settings(tmp_path), "shutdown_seconds": 3.0}))
    before = parse_config(settings(tmp_path))
    file = ConfigFile(before, path, {})
    with pytest.raises(ConfigError, match="no"):
        file.reload(Mock(side_effect=ConfigError("no")))
    assert file.config is before
    file.reload(lambda _: None)
    assert file.config.shutdown_seconds == 3.0


def _config(**sections: Any) -> Config:
    return parse_config(
        {
            "job": "j",
            "tables": [{"name": "item", "rows": 100, "dim": 4}],
            "stream": {"source": {"kind": "synthetic"}},
            **sections,
        }
    )


def test_certificate_files_are_checked_before_anything_starts(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue("daemon", "127.0.0.1")
    tls = {"cert_file": str(files.cert_file), "key_file": str(files.key_file), "ca_file": str(files.ca_file)}
    assert control_options(_config(control={"tls": tls})).tls == files
    assert control_options(_config()).tls is None
    for key in ("cert_file", "ca_file"):
        with pytest.raises(ConfigError, match=rf"control\.tls\.{key}: .*No such file") as error:
            control_options(_config(control={"tls": {**tls, key: str(tmp_path / "none")}}))
        assert error.value.remedy


def test_a_state_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match=r"state\.dir"):
        Daemon(_config(state={"dir": str(tmp_path / "file" / "state")}))


def test_tls_and_sasl_settings_reach_the_client(tmp_path: Path) -> None:
    plain = {
        "security_protocol": "SASL_SSL", "sasl_mechanism": "SCRAM-SHA-512", "ssl_cafile": "/ca.pem",
        "ssl_check_hostname": True,
    }  # fmt: skip
    from_file = {"sasl_plain_password": "s3cret", "ssl_password": "of the key"}
    for name, text in from_file.items():
        (tmp_path / name).write_text(text + "\n")
    source = {
        "kind": "kafka", "bootstrap_servers": "127.0.0.1:1", "client_options": plain,
        "client_option_files": {name: str(tmp_path / name) for name in from_file},
    }  # fmt: skip
    config = _config(stream={"source": source})
    made: Any = make_source(config)
    assert {name: made._options.get(name) for name in plain | from_file} == plain | from_file
    assert "s3cret" not in str(config.document()) + repr(config)
    made.close()
