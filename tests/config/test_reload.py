"""Keys of a changed file that apply at once, and keys that wait for a restart."""

from __future__ import annotations

from typing import Any

import pytest

from flexd.config.base import Section
from flexd.config.load import HOT_KEYS, is_hot, merge, parse_config
from flexd.config.model import Config


def config(**sections: Any) -> Config:
    return parse_config(
        {
            "job": "j",
            "tables": [{"name": "item", "rows": 100, "dim": 4}],
            "stream": {"source": {"kind": "synthetic"}},
            **sections,
        }
    )


def _has(path: str) -> bool:
    node: Any = config()
    for name in path.split("."):
        if not isinstance(node, Section) or name not in type(node).model_fields:
            return False
        node = getattr(node, name)
    return True


def test_every_hot_key_is_a_key() -> None:
    assert [path for path in HOT_KEYS if not _has(path)] == []
    assert len(set(HOT_KEYS)) == len(HOT_KEYS)


@pytest.mark.parametrize(
    ("path", "hot"),
    [
        ("log.level", True),
        ("control.throttle", True),
        ("control.throttle.bytes_per_step", True),
        ("control.throttles", False),
        ("control.listen_port", False),
        ("planner.verify_budget_steps", True),
        ("control.chunk_rows", False),
        ("job", False),
    ],
)
def test_hot(path: str, hot: bool) -> None:
    assert is_hot(path) is hot


@pytest.mark.parametrize(
    ("section", "cold"),
    [
        ("planner", set()),
        ("state", {"dir", "on_unusable"}),
        ("log", set()),
    ],
)
def test_what_waits_for_a_restart_in_sections_that_are_read_anew(section: str, cold: set[str]) -> None:
    """A key that is new is in effect at once, or is named here."""
    names = type(getattr(config(), section)).model_fields
    assert {name for name in names if not is_hot(f"{section}.{name}")} == cold


def test_hot_keys_are_taken_and_the_others_stay_as_they_are() -> None:
    running = config(log={"level": "info"}, server={"port": 1000}, planner={"interval_seconds": 10.0})
    wanted = config(
        log={"level": "debug"},
        server={"port": 2000},
        planner={"interval_seconds": 20.0, "pins": [{"table": "item", "tier": "NODE"}]},
        control={"throttle": {"bytes_per_second": 7}, "chunk_rows": 7},
        tables=[{"name": "item", "rows": 200, "dim": 4}],
        shutdown_seconds=5.0,
    )
    merged = merge(running, wanted)
    assert set(merged.applied) == {
        "log.level", "planner.interval_seconds", "planner.pins", "control.throttle.bytes_per_second",
        "shutdown_seconds",
    }  # fmt: skip
    assert set(merged.pending) == {"server.port", "control.chunk_rows", "tables"}
    effective = merged.effective
    assert (effective.log.level, effective.shutdown_seconds, effective.planner.interval_seconds) == ("debug", 5.0, 20.0)
    assert effective.control.throttle.bytes_per_second == 7
    assert effective.planner.pins == wanted.planner.pins
    assert effective.tables == running.tables
    assert (effective.server.port, effective.control.chunk_rows) == (1000, 4096)
    assert running.log.level == "info", "nothing is changed in place"


def test_another_kind_of_a_section_waits_whole() -> None:
    merged = merge(config(), config(stream={"source": {"kind": "file_log", "path": "x"}}))
    assert (merged.applied, merged.pending) == ((), ("stream.source",))
    assert merged.effective.stream.source.kind == "synthetic"
