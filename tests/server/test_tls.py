"""The API over TLS: certificates of clients, and replacement of the server certificate without a restart."""

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from flexd.api import routes
from flexd.cli.client import Credentials, DaemonAddress, DaemonClient, DaemonRefusedError, DaemonUnreachableError
from flexd.config.sections import ServerConfig, TlsConfig, TokenConfig
from flexd.core.errors import ConfigError
from flexd.server import http
from flexd.server.app import Metrics
from flexd.server.http import DaemonServer
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.api_tokens import CallerDaemon
from tests.support.certificates import Authority

TOKEN = "the token of the operator"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    authority.issue("server", "127.0.0.1")
    return authority


@pytest.fixture
def serve(certificates: Authority) -> Iterator[Callable[..., tuple[CallerDaemon, str]]]:
    started: list[DaemonServer] = []

    def start(
        *, with_tokens: bool = False, client_ca_file: Path | None = None, **config: Any
    ) -> tuple[CallerDaemon, str]:
        tokens = []
        if with_tokens:
            (certificates.directory / "token").write_text(TOKEN)
            tokens = [TokenConfig(name="tool", scope="admin", file=certificates.directory / "token")]
        settings = TlsConfig(
            cert_file=certificates.directory / "server.pem", key_file=certificates.directory / "server.key",
            client_ca_file=client_ca_file or certificates.ca_file,
            clients={"dashboard": "read", "operator": "admin"},
        )  # fmt: skip
        daemon = CallerDaemon()
        server = DaemonServer(daemon, Metrics(daemon), ServerConfig(port=0, tls=settings, tokens=tokens, **config))
        server.start()
        started.append(server)
        return daemon, server.address

    yield start
    for server in started:
        assert server.stop(10)


def client(certificates: Authority, url: str, name: str | None = None, token: str | None = None) -> DaemonClient:
    files = (certificates.issue(name).cert_file, certificates.directory / f"{name}.key") if name else ()
    return DaemonClient(DaemonAddress(url), Credentials(token, certificates.ca_file, *files))


def test_a_certificate_gives_name_and_scope(certificates: Authority, serve: Any) -> None:
    daemon, url = serve()
    assert url.startswith("https://127.0.0.1:")
    assert client(certificates, url, "dashboard").send(routes.STATUS).job == "job"
    assert client(certificates, url, "operator").send(routes.PAUSE, reason="x").paused
    assert daemon.calls == [("status", "dashboard"), ("pause", "x", "operator", "operator")]
    with pytest.raises(DaemonRefusedError, match="'dashboard' may only read"):
        client(certificates, url, "dashboard").send(routes.RESUME)
    with pytest.raises(DaemonRefusedError, match="'unlisted' has no scope here"):
        client(certificates, url, "unlisted").send(routes.STATUS)
    assert len(daemon.calls) == 2


def test_other_certificates_are_refused(certificates: Authority, serve: Any, tmp_path: Path) -> None:
    daemon, url = serve()
    with pytest.raises(DaemonUnreachableError):
        client(certificates, url).send(routes.STATUS)
    other = Authority(tmp_path)
    theirs = other.issue("operator")
    impostor = Credentials(None, certificates.ca_file, theirs.cert_file, theirs.key_file)
    with pytest.raises(DaemonUnreachableError):
        DaemonClient(DaemonAddress(url), impostor).send(routes.PAUSE, reason="x")
    with pytest.raises(DaemonUnreachableError, match="FLEXD_CA_FILE"):
        DaemonClient(DaemonAddress(url), Credentials(None, other.ca_file)).send(routes.STATUS)
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http") + "/v1/status", timeout=5)
    assert daemon.calls == []


def test_a_token_or_a_certificate_is_accepted(certificates: Authority, serve: Any) -> None:
    daemon, url = serve(with_tokens=True)
    client(certificates, url, token=TOKEN).send(routes.PAUSE, reason="x")
    client(certificates, url, "dashboard").send(routes.STATUS)
    # A token that is shown counts, whatever certificate comes with it.
    client(certificates, url, "dashboard", TOKEN).send(routes.RESUME)
    assert [call[-1] for call in daemon.calls] == ["tool", "dashboard", "tool"]
    for name, token in [(None, None), ("operator", "a guessed token")]:
        with pytest.raises(DaemonRefusedError) as caught:
            client(certificates, url, name, token).send(routes.STATUS)
        assert caught.value.status == 401
    assert len(daemon.calls) == 3


def test_a_page_of_another_site_cannot_use_a_browsers_certificate(certificates: Authority, serve: Any) -> None:
    daemon, url = serve()
    context = ssl.create_default_context(cafile=certificates.ca_file)
    files = certificates.issue("operator")
    context.load_cert_chain(files.cert_file, files.key_file)
    with httpx.Client(verify=context, timeout=10, headers=COMMAND_HEADERS) as browser:
        assert browser.post(f"{url}/v1/pause", json={}, headers={"origin": "https://evil.example"}).status_code == 403
        assert daemon.calls == []
        assert browser.post(f"{url}/v1/pause", json={}, headers={"origin": url}).status_code == 200


def test_old_versions_of_tls_are_refused(certificates: Authority) -> None:
    files = certificates.issue("versions", "127.0.0.1")
    context = http.ServerTls(TlsConfig(cert_file=files.cert_file, key_file=files.key_file), or_tokens=False).context
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_a_new_certificate_is_served_and_a_bad_one_is_not(
    certificates: Authority, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "CHECK_SECONDS", 0.0)
    _, url = serve()
    port = httpx.URL(url).port

    def served() -> str:
        return ssl.get_server_certificate(("127.0.0.1", port), timeout=5)

    # The tests' own server asks for a client's certificate after it has shown its own.
    before = served()
    (certificates.directory / "server.key").write_text("no key")
    assert served() == before
    certificates.issue("server", "127.0.0.1")
    assert {served() for _ in range(3)} != {before}
    assert served() == (certificates.directory / "server.pem").read_text().strip() + "\n"


def test_a_new_client_ca_replaces_the_old_one(
    certificates: Authority, serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(http, "CHECK_SECONDS", 0.0)
    authority = tmp_path / "clients.pem"
    authority.write_bytes(certificates.ca_file.read_bytes())
    _, url = serve(client_ca_file=authority)
    context = ssl.create_default_context(cafile=certificates.ca_file)
    files = certificates.issue("operator")
    context.load_cert_chain(files.cert_file, files.key_file)

    def status_code() -> int:
        with httpx.Client(verify=context, timeout=10) as client:
            return client.get(f"{url}/v1/status").status_code

    assert status_code() == 200
    authority.write_bytes(trustme.CA().cert_pem.bytes())
    with pytest.raises(httpx.TransportError):
        status_code()


def test_a_key_with_a_passphrase_is_an_error_without_a_prompt(certificates: Authority, tmp_path: Path) -> None:
    private = serialization.load_pem_private_key(certificates.issue("locked", "127.0.0.1").key_file.read_bytes(), None)
    locked = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"word")
    )
    (tmp_path / "locked.key").write_bytes(locked)
    config = TlsConfig(cert_file=certificates.directory / "locked.pem", key_file=tmp_path / "locked.key")
    with pytest.raises(ConfigError, match="the key has a passphrase"):
        http.ServerTls(config, or_tokens=False)


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ((), None),
        (((("commonName", "a"),),), "a"),
        (((("countryName", "x"),), (("commonName", "a"),)), "a"),
        (((("commonName", "a"), ("commonName", "b")),), None),
        (((("commonName", "a"),), (("commonName", "a"),)), None),
        (((("organizationName", "a"),),), None),
    ],
)
def test_a_certificate_names_one_client_or_none(subject: object, name: str | None) -> None:
    assert http.common_name({"subject": subject}) == name
    assert http.common_name({}) is None
    assert http.common_name(None) is None


def test_the_command_line_sends_no_token_in_the_clear(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    credentials = Credentials.choose({"FLEXD_TOKEN_FILE": str(tmp_path / "token")})
    assert TOKEN not in repr(credentials)
    shown = {"authorization": f"Bearer {TOKEN}"}
    assert credentials.headers("https://pod.example:9464", over_socket=False) == shown
    assert credentials.headers("http://[::1]:9464", over_socket=False) == shown
    assert credentials.headers("http://flexd", over_socket=True) == shown
    for url in ("http://pod.example:9464", "http://flexd"):
        with pytest.raises(ConfigError, match=f"not sent to {url} without TLS"):
            credentials.headers(url, over_socket=False)
