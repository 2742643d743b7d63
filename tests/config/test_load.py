"""Configuration files: faults with key path and allowed values, environment variables, and secrets."""

import copy
import re
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.config.model import HOT_KEYS, Config, check_config, check_tables, is_hot, load_config, merge, parse_config
from flexd.config.sections import KafkaSourceConfig
from flexd.core.errors import ConfigError

MINIMAL = {
    "job": "ads",
    "tables": [{"name": "items", "rows": 1000, "dim": 16}],
    "stream": {"source": {"kind": "file_log", "path": "log"}},
}
KAFKA = {"kind": "kafka", "bootstrap_servers": "broker:9092"}


def changed(path: str, value: object) -> dict:
    """Return ``MINIMAL`` with one key set; ``a.0.b`` is a path into a list."""
    data = copy.deepcopy(MINIMAL)
    *parents, last = path.split(".")
    node: object = data
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
    node[last] = value
    return data


def write(path: Path, data: object) -> Path:
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


def fault(data: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, origin="f.yaml")
    return str(caught.value)


def test_minimal_file_and_defaults(tmp_path):
    config = load_config(write(tmp_path / "c.yaml", MINIMAL), {})
    assert (config.job, config.server.port) == ("ads", 9464)
    assert config.server.metrics_listen is None
    assert config.keyspace().total_rows == 1000


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("job", "a b", "job: String should match pattern"),
        ("job", None, "job: Input should be a valid string (got None)"),
        ("tables.0.rows", 0, "tables[0].rows: Input should be greater than or equal to 1 (got 0)"),
        ("tables.0.rows", "1e6", "tables[0].rows: Input should be a valid integer"),
        ("tables.0.rows", True, "tables[0].rows: must be a number, not a truth value (got True)"),
        ("tables.0.dtype", "int4", "tables[0].dtype: Input should be 'float64', 'float32', "),
        (
            "tables.0.optimizer",
            "lamb",
            "tables[0].optimizer: Input should be 'sgd', 'rowwise_adagrad', 'adagrad', ",
        ),
        ("tables.0.rwos", 1, "tables[0].rwos: is not a known key; did you mean 'rows'?"),
        ("plannr", {}, "plannr: is not a known key; did you mean 'planner'?"),
        ("log.zzz", 1, "log.zzz: is not a known key; known here: level, format"),
        ("log.level", "loud", "log.level: Input should be 'debug', 'info', 'warning' or 'error' (got 'loud')"),
        ("stream.source.pth", 1, "stream.source.pth: is not a known key; did you mean 'path'?"),
        (
            "stream.source.kind",
            "rabbit",
            "stream.source.kind: must be one of file_log, kafka, file, synthetic, tap (got 'rabbit')",
        ),
        ("stream.source", {"path": "x"}, "stream.source.kind: must be one of file_log, kafka, file, synthetic, tap"),
        ("stream.source", {"kind": "kafka"}, "stream.source.bootstrap_servers: is required"),
        ("stream.source", {**KAFKA, "share": 0}, "stream.source.share: Input should be greater than 0 (got 0)"),
        ("stream.source", {**KAFKA, "share": 1.5}, "stream.source.share: Input should be less than or equal to 1"),
        (
            "stream.source",
            {**KAFKA, "client_options": {"a": [1]}},
            "stream.source.client_options: option 'a' must be text, a number or a truth value "
            "(got a mapping with 1 keys)",
        ),
        (
            "stream.source",
            {**KAFKA, "client_options": {"a": "1"}, "client_option_files": {"a": "f"}},
            "stream.source.client_option_files: given in client_options too: a",
        ),
        (
            "sketch.half_life_seconds",
            0,
            "sketch.half_life_seconds: Input should be greater than or equal to 0.001 (got 0)",
        ),
        ("sketch.half_life_seconds", float("nan"), "sketch.half_life_seconds: Input should be a finite number"),
        ("sketch.half_life_seconds", float("inf"), "sketch.half_life_seconds: Input should be a finite number"),
        ("planner.min_coverage", 1.5, "planner.min_coverage: Input should be less than or equal to 1 (got 1.5)"),
        ("planner", 3, "planner: Input should be a valid dictionary"),
        (
            "topology",
            {"preset": "a", "file": "b"},
            "topology.file: give `preset` or `file`, not both (got 'b')",
        ),
        (
            "control.listen_host",
            "0.0.0.0",
            "control.listen_host: is reachable from other machines: set control.secret_file or control.tls, or listen "
            "on 127.0.0.1 (got '0.0.0.0')",
        ),
        ("control.tls", {"cert_file": "c", "ca_file": "a"}, "control.tls.key_file: control.tls.cert_file, "),
        ("control.tls", {"cert_file": "c", "key_file": "k"}, "control.tls.ca_file: control.tls.cert_file, "),
        ("control.tls", {"key_file": "k"}, "control.tls.key_file: control.tls.cert_file, "),
        ("control.tls", {"ca_file": "a"}, "control.tls.ca_file: control.tls.cert_file, "),
        ("control.listen_port", 70_000, "control.listen_port: Input should be less than or equal to 65535 (got 70000)"),
        (
            "server.host",
            "0.0.0.0",
            "server.host: is reachable from other machines: set server.tls, or listen on 127.0.0.1",
        ),
        (
            "server.metrics_listen",
            "9465",
            "server.metrics_listen: must be host:port or [IPv6 address]:port (got '9465')",
        ),
        ("server.metrics_listen", "::1:9465", "server.metrics_listen: must be host:port"),
        ("server.metrics_listen", "h:99999", "server.metrics_listen: the port must be 0 to 65535"),
        ("shutdown_seconds", 0, "shutdown_seconds: Input should be greater than 0 (got 0)"),
    ],
)
def test_each_fault_names_path_value_and_allowed_values(path, value, expected):
    assert f"f.yaml: {expected}" in fault(changed(path, value))


def test_every_fault_is_listed():
    data = changed("tables.0.rows", 0)
    data["log"] = {"level": "loud"}
    del data["job"]
    lines = fault(data).splitlines()
    assert len(lines) == 3
    assert "f.yaml: job: is required" in lines


def test_a_secret_or_certificates_allow_other_hosts_and_a_socket_any_host():
    open_to_all = {**MINIMAL, "control": {"listen_host": "0.0.0.0", "secret_file": "/run/s"}}
    assert parse_config(open_to_all).control.listen_host == "0.0.0.0"
    open_to_all["control"] = {"listen_host": "0.0.0.0", "tls": {"cert_file": "c", "key_file": "k", "ca_file": "a"}}
    assert parse_config(open_to_all).control.tls.ca_file == Path("a")
    assert parse_config({**MINIMAL, "server": {"host": "::1"}}).server.host == "::1"
    assert parse_config({**MINIMAL, "server": {"unix_socket": "/run/x", "host": "0.0.0.0"}})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("job: [", "no valid YAML at line 1, column"),
        ("job: a\njob: b\n", "the key 'job' is given twice"),
        ("a: &x {b: 1, b: 2}\n", "the key 'b' is given twice"),
        ("- 1\n", "the top level must be a mapping, got list"),
        ("", "the top level must be a mapping, got NoneType"),
        ("!!python/object/apply:os.system ['true']", "no valid YAML"),
        ("a: 2001-99-99", "no valid YAML"),
        ("[" * 5000, "no valid YAML"),
    ],
)
def test_bad_yaml(tmp_path, text, expected):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path / "c.yaml", text), {})
    assert expected in str(caught.value)
    assert str(tmp_path / "c.yaml") in str(caught.value)


def test_unreadable_files(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"job: \xe9")
    for path in (tmp_path / "missing.yaml", tmp_path, tmp_path / "latin.yaml"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_config(path, {})


def test_variables_replace_keys_of_the_file(tmp_path):
    config = load_config(
        write(tmp_path / "c.yaml", changed("control.listen_port", 1)),
        {
            "FLEXD__CONTROL__LISTEN_PORT": "2",
            "FLEXD__SKETCH__HALF_LIFE_SECONDS": "null",
            "FLEXD__JOB": "other",
            "FLEXD__TABLES": "[{name: t, rows: 5, dim: 2}]",
            "FLEXD_URL": "http://ignored",
        },
    )
    assert config.control.listen_port == 2
    assert config.sketch.half_life_seconds is None
    assert (config.job, config.tables[0].rows) == ("other", 5)


def test_a_bad_variable_is_named(tmp_path):
    file = write(tmp_path / "c.yaml", MINIMAL)
    for variable, value, expected in (
        ("FLEXD__CONTROL__LISTEN_PORT", "x", "control.listen_port: Input should be a valid integer"),
        ("FLEXD__NO__SUCH", "1", "no: is not a known key"),
        ("FLEXD__JOB__X", "1", "'job' is not a section"),
        ("FLEXD__TABLES__0__ROWS", "1", "'tables' is not a section"),
        ("FLEXD__CONTROL__LISTEN_PORT", "[", "no valid YAML value"),
        ("FLEXD__", "1", "names no key"),
        ("FLEXD__A____B", "1", "names no key"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(file, {variable: value})
        assert expected in str(caught.value)
        assert variable in str(caught.value)


def test_passwords_from_variables_stay_text_and_are_never_shown(tmp_path):
    file = write(tmp_path / "c.yaml", changed("stream.source", KAFKA))
    prefix = "FLEXD__STREAM__SOURCE__CLIENT_OPTIONS__"
    config = load_config(
        file,
        {
            f"{prefix}SASL_PLAIN_PASSWORD": "0123",
            f"{prefix}SECURITY_PROTOCOL": "SASL_SSL",
            f"{prefix}SSL_CHECK_HOSTNAME": "no",
        },
    )
    assert isinstance(config.stream.source, KafkaSourceConfig)
    assert config.stream.source.client_options == {
        "sasl_plain_password": "0123",
        "security_protocol": "SASL_SSL",
        "ssl_check_hostname": False,
    }
    assert "0123" not in str(config.document())
    assert config.document()["stream"]["source"]["client_options"]["security_protocol"] == "SASL_SSL"
    with pytest.raises(ConfigError) as caught:
        load_config(file, {f"{prefix}SASL_PLAIN_PASSWORD": "hunter2", "FLEXD__STREAM__PASSWORD": "hunter3"})
    assert "hunter" not in str(caught.value)


def test_a_client_option_whose_file_is_missing_is_named():
    source = parse_config(changed("stream.source", {**KAFKA, "client_option_files": {"ssl_password": "none"}})).stream
    with pytest.raises(ConfigError, match=r"client_option_files\.ssl_password: .* cannot be read"):
        source.source.resolved_client_options()


def test_the_document_of_a_configuration_parses_to_it():
    config = parse_config(changed("stream.source", KAFKA))
    assert parse_config(config.document()) == config


@settings(max_examples=40, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([*Config.model_fields, "kind", "source", "x"]), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_nonsense_is_refused_by_its_key_path_or_is_in_effect(nonsense):
    for key in ("job", "stream", "server"):
        refusal, effective = "", None
        try:
            effective = parse_config({**MINIMAL, key: nonsense}).document()[key]
        except ConfigError as error:
            refusal = error.message
        if refusal:
            assert all(re.match(rf"config: {key}\b", line) for line in refusal.splitlines()), refusal
        else:
            assert effective == nonsense if key == "job" else nonsense.items() <= effective.items()


TWO_BROKERS: dict[str, Any] = {"kind": "kafka", "bootstrap_servers": "broker-0:9092, [::1]:9093"}


def config(**sections: Any) -> Config:
    return parse_config(
        {
            "job": "j",
            "tables": [{"name": "items", "rows": 100, "dim": 8}, {"name": "users", "rows": 50, "dim": 8}],
            "stream": {"source": {"kind": "synthetic"}},
            **sections,
        }
    )


def _kafka(**changed: Any) -> dict[str, Any]:
    return {"stream": {"source": {**TWO_BROKERS, **changed}}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"control": {"listen_port": 9464}}, "server.port: control.listen_port has the same port 9464; give each its own"),
    (
        {"server": {"metrics_listen": "0.0.0.0:9464"}},
        "server.metrics_listen: server.port has the same port 9464; give each its own",
    ),
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
    ({"topology": {"preset": "moon-base"}}, "topology.preset: no topology preset 'moon-base' - one of "),
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
    parsed = config(**sections)
    with pytest.raises(ConfigError) as raised:
        check_config(parsed, "file.yaml")
    lines = raised.value.message.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("file.yaml: ")
    assert expected in lines[0]


def test_jobs_have_consumer_groups_of_their_own() -> None:
    def group(**given: Any) -> str:
        return parse_config({"job": "ads", **_kafka(**given)}).stream.source.group_id

    assert (group(), group(group_id="mine")) == ("flexd-ads", "mine")
    with pytest.raises(ConfigError, match=r"stream\.source\.(kafka\.)?group_id"):
        group(group_id="")


def test_what_is_right_passes() -> None:
    planner = {
        "exclude_tables": ["users"],
        "pins": [{"table": "items", "tier": "NODE", "rows": [0, 99]}, {"table": "users", "tier": "HOME"}],
    }  # fmt: skip
    options = {"ssl_cafile": "/not/here"}
    files = {"sasl_plain_password": "/not/here/either", "security_protocol": "/x", "api_version": "/y"}
    check_config(config(planner=planner, **_kafka(client_options=options, client_option_files=files)))
    check_config(config(**_kafka(client_options={"api_version": "3.0", "security_protocol": "SSL"})))


def test_a_reload_checks_the_tables_alone() -> None:
    check_tables(config(topology={"file": "/nowhere"}))
    with pytest.raises(ConfigError, match=r"planner\.exclude_tables"):
        check_tables(config(planner={"exclude_tables": ["x"]}))


def test_every_hot_key_is_a_key() -> None:
    document = config().document()
    assert len({path for path in HOT_KEYS if reduce(getitem, path.split("."), document) is not None}) == len(HOT_KEYS)


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
    assert {name for name in type(getattr(config(), section)).model_fields if not is_hot(f"{section}.{name}")} == cold


def test_hot_keys_are_taken_and_the_others_stay_as_they_are() -> None:
    running = config(log={"level": "info"}, server={"port": 1000}, planner={"interval_seconds": 10.0})
    wanted = config(
        log={"level": "debug"},
        server={"port": 2000},
        planner={"interval_seconds": 20.0, "pins": [{"table": "items", "tier": "NODE"}]},
        control={"throttle": {"bytes_per_second": 7}, "chunk_rows": 7},
        tables=[{"name": "items", "rows": 200, "dim": 4}],
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
    assert (effective.control.throttle.bytes_per_second, effective.planner.pins) == (7, wanted.planner.pins)
    assert effective.tables == running.tables
    assert (effective.server.port, effective.control.chunk_rows) == (1000, 4096)
    assert running.log.level == "info", "nothing is changed in place"


def test_another_kind_of_a_section_waits_whole() -> None:
    merged = merge(config(), config(stream={"source": {"kind": "file_log", "path": "x"}}))
    assert (merged.applied, merged.pending) == ((), ("stream.source",))
    assert merged.effective.stream.source.kind == "synthetic"
