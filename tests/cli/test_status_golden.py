"""``flexd status`` in the conditions that somebody looks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.statuses import STATUSES

GOLDEN = Path(__file__).parent / "golden"


def missing_or_changed(golden: Any, shown: Any, path: str = "status") -> list[str]:
    """Return the faults of ``shown`` against ``golden``. Scripts read fields by name, so more fields are no fault."""
    if isinstance(golden, dict) and isinstance(shown, dict):
        return [
            fault
            for key, value in golden.items()
            for fault in missing_or_changed(value, shown.get(key, "missing"), f"{path}.{key}")
        ]
    if isinstance(golden, list) and isinstance(shown, list) and len(golden) == len(shown):
        pairs = enumerate(zip(golden, shown, strict=True))
        return [fault for i, (was, now) in pairs for fault in missing_or_changed(was, now, f"{path}[{i}]")]
    return [] if golden == shown else [f"{path}: {golden!r} is now {shown!r}"]


@pytest.mark.parametrize("name", STATUSES)
def test_status_as_a_table_in_a_pipe(flexd_command, url, daemon, name):
    daemon.status = lambda: STATUSES[name]
    done = flexd_command("status", "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert done.stdout == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", STATUSES)
def test_status_as_json_and_yaml(flexd_command, url, daemon, name):
    daemon.status = lambda: STATUSES[name]
    done = flexd_command("status", "-o", "json", "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    shown = json.loads(done.stdout)
    assert missing_or_changed(json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8")), shown) == []
    assert yaml.safe_load(flexd_command("status", "-o", "yaml", "--url", url).stdout) == shown
