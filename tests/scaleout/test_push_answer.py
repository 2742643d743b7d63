"""Encoding of the leader's answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flexd.core.errors import ScaleOutError
from flexd.scaleout import push_answer
from flexd.scaleout.push_answer import PushAnswer

ANSWER = PushAnswer("refused", {"p": 4}, {"p": 2}, {"now": 5.0}, "position", "it does not begin there")


def test_an_answer_comes_back_equal() -> None:
    assert push_answer.decode(push_answer.encode(ANSWER)) == ANSWER


def test_an_answer_of_a_neighbouring_version_is_read() -> None:
    answer = push_answer.decode(b'{"outcome": "accepted", "positions": {"p": 4}, "terms": [1, {"a": null}]}')
    assert answer == PushAnswer("accepted", {"p": 4})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("outcome", "maybe"), ("outcome", None), ("positions", {"p": -1}), ("positions", {"p": True}),
        ("positions", {"p": 1.5}), ("positions", [1]), ("durable", None), ("clock", 3),
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
