"""Addresses, tokens and certificates of the API that are allowed together."""

from typing import Any

import pytest

from flexd.config.model import Config, parse_config
from flexd.core.errors import ConfigError

TLS = {"cert_file": "/c.pem", "key_file": "/k.pem"}
CLIENTS = {**TLS, "client_ca_file": "/ca.pem", "clients": {"operator": "admin"}}
TOKENS = [{"name": "operator", "scope": "admin", "file": "/run/token"}]


def parsed(**server: Any) -> Config:
    return parse_config(
        {
            "job": "ads",
            "tables": [{"name": "items", "rows": 10, "dim": 4}],
            "stream": {"source": {"kind": "synthetic"}},
            "server": server,
        }
    )


@pytest.mark.parametrize(
    "server",
    [
        {},
        {"host": "::1"},
        {"host": "localhost", "tokens": TOKENS},
        {"unix_socket": "/run/s", "host": "0.0.0.0"},
        {"unix_socket": "/run/s", "tokens": TOKENS},
        {"host": "0.0.0.0", "tls": TLS, "tokens": TOKENS},
        {"host": "0.0.0.0", "tls": CLIENTS},
        {"host": "192.0.2.1", "tls": CLIENTS, "tokens": TOKENS},
        {"host": "127.0.0.1", "tls": TLS},
    ],
)
def test_what_may_be(server: dict[str, Any]) -> None:
    assert parsed(**server).server.model_dump(exclude_unset=True, mode="json") == server


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"host": "0.0.0.0"}, "server.host: is reachable from other machines: set server.tls, or"),
        ({"host": "::"}, "server.host: is reachable from other machines: set server.tls, or"),
        ({"host": "pod.example"}, "server.host: is reachable from other machines: set server.tls, or"),
        ({"host": "0.0.0.0", "tokens": TOKENS}, "server.host: is reachable from other machines: set server.tls, or"),
        ({"host": "0.0.0.0", "tls": TLS}, "server.host: .* set server.tokens or server.tls.clients"),
        (
            {"host": "0.0.0.0", "tls": {**TLS, "client_ca_file": "/ca.pem"}},
            "server.host: .* set server.tokens or server.tls.clients",
        ),
        ({"tls": {"cert_file": "/c.pem"}}, "server.tls.key_file: .* go together"),
        ({"tls": {"key_file": "/k.pem"}}, "server.tls.key_file: .* go together"),
        ({"tls": {"client_ca_file": "/ca.pem"}}, "server.tls.client_ca_file: .* need TLS"),
        ({"tls": {**TLS, "clients": {"a": "read"}}}, "server.tls.clients: .* set server.tls.client_ca_file"),
        ({"tls": {**CLIENTS, "clients": {"a": "root"}}}, "server.tls.clients.a: Input should be 'read' or 'admin'"),
        ({"unix_socket": "/run/s", "tls": TLS}, "server.tls: is not used on server.unix_socket"),
        ({"tokens": TOKENS * 2}, "server.tokens: each needs its own name; named twice: operator"),
        ({"tokens": [{**TOKENS[0], "scope": "root"}]}, r"server.tokens\[0\].scope: Input should be 'read' or 'admin'"),
        ({"tokens": [{"name": "a"}]}, r"server.tokens\[0\].file: is required"),
        ({"tokens": [{"name": "a", "token": "hunter2hunter2"}]}, r"server.tokens\[0\].token: is not a known key"),
    ],
)
def test_what_may_not_be_names_the_key(server: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parsed(**server)
    assert "hunter2" not in str(caught.value)
