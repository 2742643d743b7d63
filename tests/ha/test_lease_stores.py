"""Every place to keep a lease in behaves alike; and what only one of them has to get right."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from flexd.core.errors import LeaseError
from flexd.ha import kubernetes_store as kubernetes
from flexd.ha.file_store import FileLeaseStore
from flexd.ha.kubernetes_store import KubernetesLeaseStore
from flexd.ha.lease import Lease
from flexd.ha.lease_store import LeaseRecord, LeaseStore
from tests.support.disk_order import watch_disk
from tests.support.fake_kubernetes import FakeKubernetes

Make = Callable[[], LeaseStore]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeKubernetes]:
    server = FakeKubernetes(tmp_path)
    yield server
    server.close()


@pytest.fixture(params=["file", "kubernetes"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes one more store over the same record, as another process would."""
    server = FakeKubernetes(tmp_path) if request.param == "kubernetes" else None
    made: list[LeaseStore] = []

    def one() -> LeaseStore:
        store: LeaseStore
        if server is None:
            store = FileLeaseStore(tmp_path / "lease")
        else:
            store = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account)
        made.append(store)
        return store

    yield one
    for store in made:
        store.close()
    if server is not None:
        server.close()


def _content(record: LeaseRecord | None) -> tuple[str, int, float]:
    assert record is not None
    return record.holder, record.term, record.duration_seconds


def test_a_record_is_what_was_written_and_seen_by_all(make: Make) -> None:
    one, two = make(), make()
    assert one.read() is None
    first = one.compare_and_set(None, "a", 1, 5.0)
    assert _content(first) == ("a", 1, 5.0)
    assert two.read() == first == one.read()
    second = two.compare_and_set(first, "b", 2, 7.0)
    assert _content(second) == ("b", 2, 7.0)
    assert one.read() == second


def test_every_write_is_another_revision(make: Make) -> None:
    store = make()
    record = store.compare_and_set(None, "a", 1, 5.0)
    revisions = set()
    for _ in range(12):
        assert record is not None
        revisions.add(record.revision)
        record = store.compare_and_set(record, "a", 1, 5.0)
    assert len(revisions) == 12


def test_only_the_present_record_can_be_replaced(make: Make) -> None:
    one, two = make(), make()
    first = one.compare_and_set(None, "a", 1, 5.0)
    assert two.compare_and_set(None, "b", 9, 5.0) is None
    second = one.compare_and_set(first, "a", 1, 5.0)
    assert two.compare_and_set(first, "b", 9, 5.0) is None
    record = second
    for _ in range(20):
        record = one.compare_and_set(record, "a", 1, 5.0)
    assert two.compare_and_set(first, "b", 9, 5.0) is None, "also when it is long gone"
    assert one.read() == record
    assert _content(record) == ("a", 1, 5.0)


def test_a_released_record_keeps_its_term(make: Make) -> None:
    one = make()
    first = one.compare_and_set(None, "a", 3, 5.0)
    assert _content(one.compare_and_set(first, "", 3, 5.0)) == ("", 3, 5.0)
    assert _content(make().read()) == ("", 3, 5.0)


def test_of_many_who_have_seen_the_same_one_wins(make: Make) -> None:
    stores = [make() for _ in range(6)]
    seen: LeaseRecord | None = None
    for turn in range(8):
        won: list[str] = []
        start = threading.Barrier(len(stores))

        def try_it(
            name: str, store: LeaseStore, seen: LeaseRecord | None = seen, turn: int = turn,
            start: threading.Barrier = start, won: list[str] = won,
        ) -> None:  # fmt: skip
            if store.read() != seen:
                return
            start.wait(20)
            if store.compare_and_set(seen, name, turn + 1, 5.0) is not None:
                won.append(name)

        threads = [threading.Thread(target=try_it, args=(f"p{i}", store)) for i, store in enumerate(stores)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(won) == 1
        seen = stores[0].read()
        assert _content(seen)[:2] == (won[0], turn + 1)


def test_a_lease_goes_from_one_to_the_other(make: Make) -> None:
    """The rules of ``Lease`` over each store, with clocks set by hand."""
    now = {"a": 100.0, "b": 9_000.0}
    one = Lease(make(), "a", 10.0, clock=lambda: now["a"])
    two = Lease(make(), "b", 10.0, clock=lambda: now["b"])
    assert one.acquire_or_renew()
    assert not two.acquire_or_renew()
    assert (one.term, two.term) == (1, 0)
    for _ in range(5):
        now["a"] += 4
        now["b"] += 4
        assert one.acquire_or_renew()
        assert not two.acquire_or_renew(), "it is renewed"
    now["a"] += 9.4
    assert one.term == 1
    now["a"] += 0.2
    assert one.term == 0, "before the other may have it"
    now["b"] += 9.9
    assert not two.acquire_or_renew()
    now["b"] += 0.2
    assert two.acquire_or_renew()
    assert two.term == 2
    assert not one.acquire_or_renew(), "who held it is a stand-by now"
    two.release()
    assert one.acquire_or_renew()
    assert one.term == 3


def test_the_kubernetes_object_is_readable_for_people_and_keeps_what_others_put_there(server: FakeKubernetes) -> None:
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
def test_what_the_server_refuses_is_an_error_with_a_remedy(server: FakeKubernetes, status: int) -> None:
    store = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account)
    server.status = status
    if status != 404:
        with pytest.raises(LeaseError, match=str(status)):
            store.read()
    with pytest.raises(LeaseError, match=str(status)) as refused:
        store.compare_and_set(None, "a", 1, 5.0)
    assert refused.value.remedy
    store.close()


def test_a_deleted_object_is_a_conflict_and_then_nothing(server: FakeKubernetes) -> None:
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
def test_an_object_that_is_no_lease_is_refused(server: FakeKubernetes, change: dict[str, Any]) -> None:
    store = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account)
    store.compare_and_set(None, "a", 1, 5.0)
    server.objects["jobs", "flexd-j"] |= change
    with pytest.raises(LeaseError, match="no lease"):
        store.read()
    store.close()


def test_outside_of_a_pod_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(LeaseError, match="service account"):
        KubernetesLeaseStore("x", account=tmp_path)
    with pytest.raises(LeaseError, match="not running in a pod"):
        KubernetesLeaseStore("x", namespace="jobs", account=tmp_path)


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [("10.0.0.1", "6443", "https://10.0.0.1:6443"), ("fd00::1", None, "https://[fd00::1]:443")],
)
def test_the_api_server_is_where_the_pod_is_told(host: str, port: str | None, url: str) -> None:
    told = {"KUBERNETES_SERVICE_HOST": host} | ({"KUBERNETES_SERVICE_PORT": port} if port else {})
    assert kubernetes._api_url(told) == url


@pytest.mark.parametrize("known", [True, False])
def test_only_the_api_server_of_the_cluster_is_told_the_token(tmp_path: Path, known: bool) -> None:
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


def test_nobody_on_the_way_is_told_the_token(
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


def test_a_server_that_hangs_is_given_up(server: FakeKubernetes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        store = KubernetesLeaseStore("x", api_url=url, account=server.account, timeout_seconds=0.1)
        with pytest.raises(LeaseError, match="does not respond"):
            store.read()
        store.close()


def test_a_server_that_is_not_there(server: FakeKubernetes, tmp_path: Path) -> None:
    store = KubernetesLeaseStore("x", api_url="http://127.0.0.1:1", account=server.account)
    with pytest.raises(LeaseError, match="does not respond"):
        store.read()
    store.close()


def test_files_of_the_directory_are_private_and_few(tmp_path: Path) -> None:
    store = FileLeaseStore(tmp_path / "lease")
    record = None
    for _ in range(30):
        record = store.compare_and_set(record, "a", 1, 5.0)
    assert stat.S_IMODE((tmp_path / "lease").stat().st_mode) == 0o700
    files = list((tmp_path / "lease").iterdir())
    assert len(files) < 8
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", '{"holder": 1}', '{"holder":"a","term":0,"duration_seconds":1}', "x" * 5000,
        f'{{"holder":"{"a" * 257}","term":1,"duration_seconds":1}}',
        '{"holder":"a","term":2147483648,"duration_seconds":1}', '{"holder":"a","term":1,"duration_seconds":Infinity}',
        '{"holder":"a","term":1,"duration_seconds":86401}', '{"holder":"a","term":true,"duration_seconds":1}',
        '{"holder":"a","term":1,"duration_seconds":NaN}', '{"holder":"a","term":1,"duration_seconds":1}' + " " * 4096,
    ],
)  # fmt: skip
def test_a_damaged_file_is_an_error(tmp_path: Path, content: str) -> None:
    store = FileLeaseStore(tmp_path)
    (tmp_path / "lease-7").write_text(content)
    with pytest.raises(LeaseError, match="lease-7 is no lease"):
        store.read()


def test_other_files_of_the_directory_are_no_leases(tmp_path: Path) -> None:
    store = FileLeaseStore(tmp_path)
    for name in ("lease-9.bak", "my-lease-9", "lease-", "lease-" + "9" * 19):
        (tmp_path / name).write_text("{}")
    assert store.read() is None
    assert _content(store.compare_and_set(None, "a", 1, 5.0)) == ("a", 1, 5.0)
    assert _content(store.read()) == ("a", 1, 5.0)


def test_a_record_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileLeaseStore(tmp_path / "lease")
    done = watch_disk(monkeypatch)
    assert store.compare_and_set(None, "a", 1, 5.0) is not None
    assert done[0].startswith("sync .")
    assert done[1:] == ["name lease-1", "sync lease"]
    assert os.listdir(tmp_path / "lease") == ["lease-1"], "nothing half made stays"


def test_a_record_that_others_removed_during_a_look_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileLeaseStore(tmp_path)
    record = store.compare_and_set(None, "a", 1, 5.0)
    listed = [9, 9, 1]
    monkeypatch.setattr(store, "_highest", lambda: listed.pop(0))
    assert store.read() == record
    monkeypatch.setattr(store, "_highest", lambda: 9)
    with pytest.raises(LeaseError, match="changes faster"):
        store.read()


def test_half_made_files_of_the_dead_are_removed(tmp_path: Path) -> None:
    old, young = tmp_path / ".1-a.tmp", tmp_path / ".2-b.tmp"
    old.touch()
    young.touch()
    os.utime(old, (1, 1))
    FileLeaseStore(tmp_path)
    assert not old.exists()
    assert young.exists()


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LeaseError, match="cannot be made"):
        FileLeaseStore(tmp_path / "file" / "lease")
