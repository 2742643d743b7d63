"""Encoding of the leader's answers."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from flexd.core.errors import ScaleOutError
from flexd.core.keyspace import TableSpec
from flexd.scaleout import push_answer
from flexd.scaleout.push_answer import PushAnswer

ANSWER = PushAnswer("refused", {"p": 4}, {"p": 2}, {"now": 5.0}, "position", "it does not begin there")


def test_an_answer_comes_back_equal() -> None:
    assert push_answer.decode(push_answer.encode(ANSWER)) == ANSWER
    tables = (TableSpec("item", 9, 4), TableSpec("shop", 5, 2, "float16", "adam", "node:1"))
    with_tables = replace(ANSWER, reason="other_tables", tables=tables)
    assert push_answer.decode(push_answer.encode(with_tables)) == with_tables


def test_fields_of_tables_that_a_later_version_adds_are_ignored() -> None:
    document = {"outcome": "refused", "positions": {}, "tables": [{**asdict(TableSpec("item", 9, 4)), "later": 1}]}
    assert push_answer.decode(json.dumps(document).encode()).tables == (TableSpec("item", 9, 4),)


def test_an_answer_of_a_neighbouring_version_is_read() -> None:
    answer = push_answer.decode(b'{"outcome": "accepted", "positions": {"p": 4}, "terms": [1, {"a": null}]}')
    assert answer == PushAnswer("accepted", {"p": 4})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("outcome", "maybe"), ("outcome", None), ("positions", {"p": -1}), ("positions", {"p": True}),
        ("positions", {"p": 1.5}), ("positions", [1]), ("durable", None), ("clock", 3),
        ("tables", 3), ("tables", [3]), ("tables", [{"name": "a", "rows": 1.5, "dim": 2}]), ("tables", [{"name": "a"}]),
        ("tables", [{"name": "a", "rows": 0, "dim": 2}]), ("tables", [{"name": "a", "rows": 1, "dim": True}]),
    ],
)  # fmt: skip
def test_a_wrong_field_is_malformed(field: str, value: Any) -> None:
    document = {**json.loads(push_answer.encode(ANSWER)), field: value}
    with pytest.raises(ScaleOutError) as caught:
        push_answer.decode(json.dumps(document).encode())
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_data_of_another_shape_is_malformed(data: bytes) -> None:
    with pytest.raises(ScaleOutError) as caught:
        push_answer.decode(data)
    assert caught.value.reason == "malformed"
