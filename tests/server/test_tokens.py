"""Token files: replacement, digests, and one name for each token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from flexd.config.server import TokenConfig
from flexd.core import secrets as secret
from tests.support.api_tokens import READ, get, serve, token_configs
from tests.support.fake_daemon import FakeDaemon


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[str]:
    server = serve(FakeDaemon(), tokens=token_configs(tmp_path))
    yield server.address
    assert server.stop(10)


def test_a_token_is_replaced_without_a_restart(guarded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "RELOAD_SECONDS", 0.0)
    (tmp_path / "read").write_text(f"another token of it\n{READ}\n")
    assert [get(guarded, token).status_code for token in (READ, "another token of it")] == [200, 200]
    (tmp_path / "read").write_text("another token of it\n")
    assert [get(guarded, token).status_code for token in (READ, "another token of it")] == [401, 200]


@pytest.mark.parametrize(
    "token", ["sha256:" + "0" * 64 + " and more", "x" * 2_000, "sécurité des données", "  with spaces around it "]
)
def test_a_token_is_its_whole_line(tmp_path: Path, token: str) -> None:
    """A token that begins like a digest, is long, or is not ASCII is compared as a whole."""
    (tmp_path / "token").write_text(token + "\n", encoding="utf-8")
    server = serve(FakeDaemon(), tokens=[TokenConfig(name="x", scope="read", file=tmp_path / "token")])
    try:
        for sent, status in ((token, 200), (token.strip() + "x", 401), (token.strip()[:-1], 401)):
            headers = {b"authorization": b"Bearer " + sent.strip().encode()}
            assert httpx.get(f"{server.address}/v1/status", headers=headers, timeout=10).status_code == status
    finally:
        assert server.stop(10)
