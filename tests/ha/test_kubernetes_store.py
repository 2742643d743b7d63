"""A lease in an object of Kubernetes: requests, credentials, and objects of another kind."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from flexd.core.errors import LeaseError
from flexd.ha import kubernetes_store as kubernetes
from flexd.ha.kubernetes_store import KubernetesLeaseStore
from flexd.ha.lease import Lease
from flexd.ha.lease_store import LeaseRecord
from tests.support.fake_kubernetes import FakeKubernetes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeKubernetes]:
    server = FakeKubernetes(tmp_path)
    yield server
    server.close()


def _content(record: LeaseRecord | None) -> tuple[str, int, float]:
    assert record is not None
    return record.holder, record.term, record.duration_seconds


def test_the_object_has_the_standard_fields_and_keeps_foreign_ones(server: FakeKubernetes) -> None:
    store = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account)
    first = store.compare_and_set(None, "pod-1", 4, 14.2)
    stored = server.objects["jobs", "flexd-j"]
    assert stored["spec"]["holderIdentity"] == "pod-1"
    assert stored["spec"]["leaseTransitions"] == 4
    assert stored["spec"]["leaseDurationSeconds"] == 15
    acquired = stored["spec"]["acquireTime"]
    stored["metadata"]["labels"] = {"team": "ranking"}
    store.read()
    second = store.compare_and_set(first, "pod-1", 4, 14.2)
    stored = server.objects["jobs", "flexd-j"]
    assert stored["metadata"]["labels"] == {"team": "ranking"}
    assert stored["spec"]["acquireTime"] == acquired
    assert stored["spec"]["renewTime"] > acquired
    third = store.compare_and_set(second, "pod-1", 5, 14.2)
    assert server.objects["jobs", "flexd-j"]["spec"]["acquireTime"] > acquired
    store.compare_and_set(third, "", 5, 14.2)
    assert "holderIdentity" not in server.objects["jobs", "flexd-j"]["spec"]
    store.close()


def test_a_new_token_is_used_at_once(server: FakeKubernetes) -> None:
    store = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account)
    assert store.read() is None
    server.rotate("second")
    assert store.read() is None
    (server.account / "token").write_text("wrong")
    with pytest.raises(LeaseError, match="401") as refused:
        store.read()
    assert "wrong" not in str(refused.value)
    store.close()


@pytest.mark.parametrize("status", [403, 404, 429, 500, 302])
def test_a_refusal_of_the_server_is_an_error_with_a_remedy(server: FakeKubernetes, status: int) -> None:
    store = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account)
    server.status = status
    if status != 404:
        with pytest.raises(LeaseError, match=str(status)):
            store.read()
    with pytest.raises(LeaseError, match=str(status)) as refused:
        store.compare_and_set(None, "a", 1, 5.0)
    assert refused.value.remedy
    store.close()


def test_a_deleted_object_is_a_conflict_and_then_absent(server: FakeKubernetes) -> None:
    store = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account)
    first = store.compare_and_set(None, "a", 6, 5.0)
    server.objects.clear()
    assert store.compare_and_set(first, "a", 6, 5.0) is None
    assert store.read() is None
    lease = Lease(store, "b", 5.0, highest_known_term=lambda: 6)
    assert lease.acquire_or_renew()
    assert lease.term == 7, "terms go on where another memory has them"
    store.close()


@pytest.mark.parametrize(
    "change",
    [
        {"spec": None},
        {"metadata": {}},
        {"spec": {"leaseTransitions": "1"}},
        {"spec": {"leaseTransitions": -1}},
        {"spec": {"leaseTransitions": 2**31}},
        {"spec": {"leaseTransitions": True}},
        {"metadata": {"resourceVersion": 7}},
        {"metadata": {"resourceVersion": "7", "annotations": {"much": "x" * 2**20}}},
        {"spec": {"leaseDurationSeconds": 10**9}},
        {"spec": {"holderIdentity": "x" * 300}},
        {"spec": {"holderIdentity": ["x"]}},
    ],
)
def test_a_malformed_object_is_refused(server: FakeKubernetes, change: dict[str, Any]) -> None:
    store = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account)
    store.compare_and_set(None, "a", 1, 5.0)
    server.objects["jobs", "flexd-j"] |= change
    with pytest.raises(LeaseError, match="no lease"):
        store.read()
    store.close()


def test_outside_of_a_pod_the_store_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(LeaseError, match="service account"):
        KubernetesLeaseStore("x", account=tmp_path)
    with pytest.raises(LeaseError, match="not running in a pod"):
        KubernetesLeaseStore("x", namespace="jobs", account=tmp_path)


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [("10.0.0.1", "6443", "https://10.0.0.1:6443"), ("fd00::1", None, "https://[fd00::1]:443")],
)
def test_the_address_of_the_api_server_is_read_from_the_environment(host: str, port: str | None, url: str) -> None:
    told = {"KUBERNETES_SERVICE_HOST": host} | ({"KUBERNETES_SERVICE_PORT": port} if port else {})
    assert kubernetes._api_url(told) == url


@pytest.mark.parametrize("known", [True, False])
def test_the_token_is_sent_only_to_a_server_with_a_certificate_of_the_cluster(tmp_path: Path, known: bool) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server = FakeKubernetes(tmp_path, context)
    (authority if known else trustme.CA()).cert_pem.write_to_path(str(server.account / "ca.crt"))
    store = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account, timeout_seconds=10.0)
    try:
        if known:
            assert _content(store.compare_and_set(None, "a", 1, 5.0)) == ("a", 1, 5.0)
        else:
            with pytest.raises(LeaseError, match="does not respond"):
                store.compare_and_set(None, "a", 1, 5.0)
            assert server.objects == {}
    finally:
        store.close()
        server.close()


def test_the_token_is_not_sent_to_proxies_or_redirects(
    server: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.setenv(name.lower(), "http://127.0.0.1:1")
    store = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account)
    assert store.read() is None
    (tmp_path / "other").mkdir()
    other = FakeKubernetes(tmp_path / "other")
    try:
        server.location = f"{other.url}/apis/coordination.k8s.io/v1/namespaces/jobs/leases"
        with pytest.raises(LeaseError, match="307"):
            store.compare_and_set(None, "a", 1, 5.0)
        assert (other.requests, other.objects) == (0, {})
    finally:
        store.close()
        other.close()


def test_a_request_to_a_server_that_hangs_times_out(server: FakeKubernetes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        store = KubernetesLeaseStore("x", api_url=url, account=server.account, timeout_seconds=0.1)
        with pytest.raises(LeaseError, match="does not respond"):
            store.read()
        store.close()


def test_an_unreachable_server_is_an_error(server: FakeKubernetes, tmp_path: Path) -> None:
    store = KubernetesLeaseStore("x", api_url="http://127.0.0.1:1", account=server.account)
    with pytest.raises(LeaseError, match="does not respond"):
        store.read()
    store.close()


def test_a_renewal_that_answers_after_expiry_does_not_revive_the_standing(server: FakeKubernetes) -> None:
    """Over HTTP: the server executes the renewal in time and its response arrives after the lease has ended."""
    now = 0.0
    store = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account)
    lease = Lease(store, "pod-1", 10.0, clock=lambda: now)
    assert lease.acquire_or_renew()
    now = 9.0
    seen: list[bool] = []

    def answer_late(method: str) -> None:
        nonlocal now
        if method == "PUT":
            now = 12.0
            seen.append(lease.holds(1))

    server.before_answer = answer_late
    assert not lease.acquire_or_renew()
    assert seen == [False]
    assert not lease.holds(1)
    assert server.objects["jobs", "flexd-j"]["spec"]["leaseTransitions"] == 1
    server.before_answer = lambda method: None
    assert lease.acquire_or_renew()
    assert lease.holds(2)
    store.close()
