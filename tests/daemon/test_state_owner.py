"""A state directory belongs to one job: a daemon of another refuses it by name, before it changes anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from flexd.cli.client import ExitCode, exit_code_of
from flexd.cli.main import app
from flexd.config.load import parse_config
from flexd.config.model import Config
from flexd.core.errors import UnusableStateError
from flexd.daemon import Daemon

TABLES = [{"name": "item", "rows": 100, "dim": 4}]


def document(directory: Path, job: str, **sections: Any) -> dict[str, Any]:
    return {
        "job": job, "tables": TABLES, "stream": {"source": {"kind": "tap"}}, "control": {"listen_port": 0},
        "server": {"port": 0}, "state": {"dir": str(directory / "state")}, **sections,
    }  # fmt: skip


def run_once(config: Config) -> None:
    """Start a daemon and stop it: it writes a snapshot."""
    daemon = Daemon(config)
    daemon.start()
    assert daemon.stop(20.0)


@pytest.fixture
def of_laptop(tmp_path: Path) -> Path:
    """Return a directory with the state of job "laptop"."""
    run_once(parse_config(document(tmp_path, "laptop")))
    return tmp_path


def content(directory: Path) -> dict[str, bytes]:
    """Return the files of the state but the lock."""
    paths = [path for path in (directory / "state").rglob("*") if path.is_file()]
    left_out = ("lock",)
    return {str(path): path.read_bytes() for path in paths if not path.name.endswith(left_out)}


@pytest.mark.parametrize("on_unusable", ["exit", "reset"])
@pytest.mark.parametrize("tables", [TABLES, []], ids=["tables", "tables of the ranks"])
def test_another_job_is_refused_by_name_and_nothing_changes(
    of_laptop: Path, on_unusable: str, tables: list[dict[str, Any]]
) -> None:
    # Files that a start would quarantine.
    (of_laptop / "state" / "state.sqlite").write_text("no database")
    before = content(of_laptop)
    state = {"dir": str(of_laptop / "state"), "on_unusable": on_unusable}
    config = parse_config(document(of_laptop, "sasrec", tables=tables, state=state))
    with pytest.raises(
        UnusableStateError, match=r"has the state of job 'laptop', not of 'sasrec' - .*of its own"
    ) as no:
        Daemon(config)
    assert exit_code_of(no.value) is ExitCode.STATE_UNUSABLE
    assert content(of_laptop) == before


def test_a_daemon_that_waits_for_its_state_names_the_other_job(of_laptop: Path) -> None:
    before = content(of_laptop)
    state = {"dir": str(of_laptop / "state"), "on_unusable": "wait"}
    config = parse_config(document(of_laptop, "sasrec", state=state))
    daemon = Daemon(config)
    assert "has the state of job 'laptop'" in daemon.ready().reasons[0]
    assert content(of_laptop) == before


def test_state_commands_refuse_the_state_of_another_job(of_laptop: Path) -> None:
    before = content(of_laptop)
    path = of_laptop / "sasrec.yaml"
    path.write_text(yaml.safe_dump(document(of_laptop, "sasrec")))
    shown = CliRunner().invoke(app, ["state", "show", "-c", str(path)])
    assert shown.exit_code == ExitCode.STATE_UNUSABLE
    assert "laptop" in shown.output
    reset = CliRunner().invoke(app, ["state", "reset", "--yes", "-c", str(path)])
    assert reset.exit_code != 0
    assert "laptop" in f"{reset.output}{reset.exception}"
    assert content(of_laptop) == before


def test_tables_that_ranks_say_are_kept_for_their_job_alone(tmp_path: Path) -> None:
    """A daemon that has no tables yet marks the directory too."""
    daemon = Daemon(parse_config(document(tmp_path, "laptop", tables=[])))
    daemon.start()
    try:
        assert (tmp_path / "state" / "job").read_text() == "laptop\n"
    finally:
        daemon.stop(20.0)
