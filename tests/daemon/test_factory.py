"""Parts built from a configuration, and the errors of parts that cannot be built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flexd.config.load import parse_config
from flexd.config.model import Config
from flexd.core.errors import ConfigError, SnapshotError
from flexd.daemon import Daemon, factory
from tests.support.certificates import Authority


def _config(**sections: Any) -> Config:
    return parse_config(
        {
            "job": "j",
            "tables": [{"name": "item", "rows": 100, "dim": 4}],
            "stream": {"source": {"kind": "synthetic"}},
            **sections,
        }
    )


def test_certificate_files_are_checked_before_anything_starts(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue("daemon", "127.0.0.1")
    tls = {"cert_file": str(files.cert_file), "key_file": str(files.key_file), "ca_file": str(files.ca_file)}
    assert factory.control_options(_config(control={"tls": tls})).tls == files
    assert factory.control_options(_config()).tls is None
    for key in ("cert_file", "ca_file"):
        with pytest.raises(ConfigError, match=rf"control\.tls\.{key}: .*No such file") as error:
            factory.control_options(_config(control={"tls": {**tls, key: str(tmp_path / "none")}}))
        assert error.value.remedy


def test_a_state_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match=r"state\.dir"):
        Daemon(_config(state={"dir": str(tmp_path / "file" / "state")}))


def test_tls_and_sasl_settings_reach_the_client(tmp_path: Path) -> None:
    plain = {
        "security_protocol": "SASL_SSL", "sasl_mechanism": "SCRAM-SHA-512", "ssl_cafile": "/ca.pem",
        "ssl_check_hostname": True,
    }  # fmt: skip
    from_file = {"sasl_plain_password": "s3cret", "ssl_password": "of the key"}
    files = {}
    for name, text in from_file.items():
        files[name] = str(tmp_path / name)
        (tmp_path / name).write_text(text + "\n")
    source = {
        "kind": "kafka", "bootstrap_servers": "127.0.0.1:1", "client_options": plain,
        "client_option_files": files,
    }  # fmt: skip
    config = _config(stream={"source": source})
    made = factory.make_source(config)
    given = made._options  # type: ignore[attr-defined]
    assert {name: given.get(name) for name in plain | from_file} == plain | from_file
    assert "s3cret" not in str(config.document()) + repr(config)
    made.close()
