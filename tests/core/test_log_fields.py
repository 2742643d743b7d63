"""Events in the log: ``key=value`` text, and data for the JSON format."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from flexd.core.log_fields import format_fields, log_event, set_up_logging


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "5"),
        (0.25, "0.25"),
        (True, "true"),
        (None, "null"),
        ("plan-1", "plan-1"),
        ("", '""'),
        ("two words", '"two words"'),
        ('a="b"', '"a=\\"b\\""'),
        ("two\nlines", '"two\\nlines"'),
        ((1, 2), "[1,2]"),
        ({3, 1}, "[1,3]"),
        (ValueError("no disk"), '"no disk"'),
    ],
)
def test_a_value_is_one_word_that_reads_back(value: object, text: str) -> None:
    assert list(format_fields({"key": value})) == [f"key={text}"]


@pytest.fixture(autouse=True)
def _restore_logging() -> Any:
    root, levels = logging.getLogger(), {name: logging.getLogger(name).level for name in ("kafka", "uvicorn", "httpx")}
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


def test_a_text_line_of_an_event_holds_no_python_dict(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("ads", "info", "text")
    fields = {"epoch": 3, "ranks": 4, "layout": {"nodes": 2, "local": 2}, "reason": "a rank joined"}
    log_event(logging.getLogger("flexd"), logging.INFO, "control channel: epoch_live", fields)
    line = capsys.readouterr().err
    assert line.endswith(
        'control channel: epoch_live epoch=3 ranks=4 layout.nodes=2 layout.local=2 reason="a rank joined"\n'
    )
    assert "{" not in line


def test_a_json_line_of_an_event_keeps_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("ads", "info", "json")
    fields = {"epoch": 3, "layout": {"nodes": 2}, "error": ValueError("x")}
    log_event(logging.getLogger("flexd"), logging.INFO, "control channel: epoch_live", fields)
    entry = json.loads(capsys.readouterr().err)
    assert entry["message"] == "control channel: epoch_live epoch=3 layout.nodes=2 error=x"
    assert (entry["job"], entry["level"]) == ("ads", "info")
    assert entry["fields"] == {"epoch": 3, "layout": {"nodes": 2}, "error": "x"}
