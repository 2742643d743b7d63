"""``stream.mapping``: each fault is named by its key path."""

from typing import Any

import pytest

from flexd.config.model import Config, parse_config
from flexd.core.errors import ConfigError

KAFKA = {"kind": "kafka", "bootstrap_servers": "b:1"}


def parsed(mapping: dict[str, Any], source: dict[str, Any] = KAFKA) -> Config:
    return parse_config({"job": "ads", "stream": {"source": source, "mapping": mapping}})


PLAIN = {"format": "json", "table": "items", "rows": "$.ids[*]"}


def test_what_may_be() -> None:
    for given in (
        PLAIN,
        {"format": "json", "table": {"items": '$["a b"][*].id', "users": "$.user"}, "time": "$.at"},
        {**PLAIN, "table": "$.name", "where": "$.type in [1, 2]", "user": "$.user.id"},
        {**PLAIN, "rows": "$.shown[*].ids[*]", "sample": "$.shown[*].id"},
        {**PLAIN, "format": "protobuf", "definition": "d", "message": "a.B"},
    ):
        mapping = parsed(given).stream.mapping
        assert mapping is not None
        assert mapping.model_dump(exclude_unset=True) == given


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "xml"}, "format: Input should be 'json', 'avro', 'protobuf' or 'arrow'"),
        ({"rows": "ids"}, "rows: must be a path: $ and up to 32 steps"),
        ({"rows": "$" + "[*]" * 33}, "rows: must be a path"),
        ({"rows": None}, "rows: is required beside the name of a table"),
        ({"table": {"items": "$.a"}}, "rows: table has the paths already"),
        ({"table": {"items": "a"}, "rows": None}, "table: table 'items': must be a path"),
        ({"table": {}}, "table: must be a name, a path, or paths by table"),
        ({"time": "ts"}, "time: must be a path"),
        ({"time_unit": "minutes"}, "time_unit: Input should be"),
        ({"where": "type = 1"}, "where: must compare a field with a JSON value"),
        ({"where": "$.a[*] == 1"}, "where: must compare a field with a JSON value"),
        ({"format": "avro"}, "definition: is required by avro and protobuf"),
        ({"definition": "x"}, "definition: only avro and protobuf have one"),
        ({"format": "protobuf", "definition": "x"}, "message: is required by protobuf"),
        ({"user": "$.other[*].user"}, "user: the lists on the way of user, $.other[*].user, must be those on the way"),
        ({"sample": "$.ids[*].x[*]"}, "user: the lists on the way of sample"),
        ({"ids": {"items": {"hash": "md5"}}}, "ids.items.hash: Input should be 'xxh64'"),
        ({"ids": {"items": {"hash": "xxh64", "decimal": True}}}, "ids.items.decimal: hash is given too"),
        ({"filter": "x"}, "filter: is not a known key"),
    ],
)
def test_what_may_not_be_names_the_key(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed({**PLAIN, **changes})
    assert f"stream.mapping.{said}" in caught.value.message


def test_a_source_without_messages_has_no_mapping() -> None:
    with pytest.raises(ConfigError, match=r"stream\.mapping: a source of kind tap has no messages to map"):
        parsed(PLAIN, {"kind": "tap"})
