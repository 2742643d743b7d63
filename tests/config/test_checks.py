"""Faults that ``run`` and ``check-config`` refuse, with the key path."""

from __future__ import annotations

from typing import Any

import pytest

from flexd.config.checks import check_config, check_tables
from flexd.config.load import parse_config
from flexd.core.errors import ConfigError

KAFKA: dict[str, Any] = {"kind": "kafka", "bootstrap_servers": "broker-0:9092, [::1]:9093"}


def _document(**sections: Any) -> dict[str, Any]:
    return {
        "job": "j",
        "tables": [{"name": "items", "rows": 100, "dim": 8}, {"name": "users", "rows": 50, "dim": 8}],
        "stream": {"source": {"kind": "synthetic"}},
        **sections,
    }


def _kafka(**changed: Any) -> dict[str, Any]:
    return {"stream": {"source": {**KAFKA, **changed}}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"planner": {"exclude_tables": ["item"]}},
        "planner.exclude_tables: no table in tables is named 'item'; did you me",
    ),
    ({"planner": {"exclude_tables": ["zzz"]}}, "planner.exclude_tables: no table in tables is named 'zzz'; known tab"),
    (
        {
            "tables": [{"name": "items", "rows": 10, "dim": 4, "sharding": "table_row_wise:0"}],
            "planner": {"pins": [{"table": "items", "tier": "NODE"}]},
        },
        "planner.pins[0].tier: 'items' is not sharded row_wise",
    ),
    ({"planner": {"pins": [{"table": "item", "tier": "NODE"}]}}, "planner.pins[0].table: no table in tables is named"),
    (
        {"planner": {"pins": [{"table": "items", "tier": "NODE", "rows": [0, 100, -1]}]}},
        "planner.pins[0].rows: rows of table 'items' are 0 to 99 (got 100, -1)",
    ),
    (
        {"planner": {"exclude_tables": ["items"], "pins": [{"table": "items", "tier": "DEVICE"}]}},
        "planner.pins[0].tier: 'items' is in planner.exclude_tables",
    ),
    ({"topology": {"preset": "moon-base"}}, "topology.preset: must be one of "),
    ({"topology": {"file": "/nowhere/cluster.yaml"}}, "topology.file: /nowhere/cluster.yaml: cannot be read"),
    (
        {"sketch": {"memory_bytes": 2**20}, "tables": [{"name": f"t{i}", "rows": 10**9, "dim": 8} for i in range(99)]},
        "sketch.memory_bytes: 99 tables cannot be counted in 1048576 bytes",
    ),
    (_kafka(bootstrap_servers="broker"), "stream.source.bootstrap_servers: must be host:port"),
    (_kafka(bootstrap_servers="a:9092,b"), "(got 'b')"),
    (_kafka(bootstrap_servers="a:0"), "stream.source.bootstrap_servers: the port must be 1 to 65535 (got 'a:0')"),
    (
        _kafka(client_options={"sasl_mechanismm": "PLAIN"}),
        "stream.source.client_options.sasl_mechanismm: is not an option of the Kafka client; did you mean 'sasl_mech",
    ),
    (
        _kafka(client_option_files={"sasl_plain_pasword": "/run/secrets/x"}),
        "stream.source.client_option_files.sasl_plain_pasword: is not an option",
    ),
    (
        _kafka(client_options={"security_protocol": "TLS"}),
        "client_options: Kafka security_protocol 'TLS'",
    ),
    (
        _kafka(client_options={"group_id": "mine"}),
        "client_options: Kafka client options group_id are set",
    ),
    (_kafka(client_options={"api_version": "three"}), "stream.source.client_options: "),
]


@pytest.mark.parametrize(("sections", "expected"), REFUSED, ids=[expected[:50] for _, expected in REFUSED])
def test_what_the_parts_would_refuse_is_named_by_its_key(sections: dict[str, Any], expected: str) -> None:
    config = parse_config(_document(**sections))
    with pytest.raises(ConfigError) as raised:
        check_config(config, "file.yaml")
    lines = raised.value.message.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("file.yaml: ")
    assert expected in lines[0]


def test_what_is_right_passes() -> None:
    planner = {
        "exclude_tables": ["users"],
        "pins": [{"table": "items", "tier": "NODE", "rows": [0, 99]}, {"table": "users", "tier": "HOME"}],
    }  # fmt: skip
    options = {"security_protocol": "SASL_SSL", "api_version": "3.0", "ssl_cafile": "/not/here"}
    files = {"sasl_plain_password": "/not/here/either", "security_protocol": "/x", "api_version": "/y"}
    del options["security_protocol"], options["api_version"]
    check_config(parse_config(_document(planner=planner, **_kafka(client_options=options, client_option_files=files))))
    check_config(parse_config(_document(**_kafka(client_options={"api_version": "3.0", "security_protocol": "SSL"}))))


def test_a_reload_checks_the_tables_alone() -> None:
    config = parse_config(_document(topology={"file": "/nowhere"}))
    check_tables(config)
    with pytest.raises(ConfigError, match=r"planner\.exclude_tables"):
        check_tables(parse_config(_document(planner={"exclude_tables": ["x"]})))
