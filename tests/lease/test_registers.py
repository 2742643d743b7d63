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
    """Makes one more register over the same record, as another process would."""
    server = FakeKubernetes(tmp_path) if request.param == "kubernetes" else None
    made: list[LeaseStore] = []

    def one() -> LeaseStore:
        register: LeaseStore
        if server is None:
            register = FileLeaseStore(tmp_path / "lease")
        else:
            register = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account)
        made.append(register)
        return register

    yield one
    for register in made:
        register.close()
    if server is not None:
        server.close()


def _content(record: LeaseRecord | None) -> tuple[str, int, float]:
    assert record is not None
    return record.holder, record.term, record.duration_seconds


def test_a_record_is_what_was_written_and_seen_by_all(make: Make) -> None:
    one, two = make(), make()
    assert one.read() is None
    first = one.replace(None, "a", 1, 5.0)
    assert _content(first) == ("a", 1, 5.0)
    assert two.read() == first == one.read()
    second = two.replace(first, "b", 2, 7.0)
    assert _content(second) == ("b", 2, 7.0)
    assert one.read() == second


def test_every_write_is_another_revision(make: Make) -> None:
    register = make()
    record = register.replace(None, "a", 1, 5.0)
    revisions = set()
    for _ in range(12):
        assert record is not None
        revisions.add(record.revision)
        record = register.replace(record, "a", 1, 5.0)
    assert len(revisions) == 12


def test_only_the_present_record_can_be_replaced(make: Make) -> None:
    one, two = make(), make()
    first = one.replace(None, "a", 1, 5.0)
    assert two.replace(None, "b", 9, 5.0) is None
    second = one.replace(first, "a", 1, 5.0)
    assert two.replace(first, "b", 9, 5.0) is None
    record = second
    for _ in range(20):
        record = one.replace(record, "a", 1, 5.0)
    assert two.replace(first, "b", 9, 5.0) is None, "also when it is long gone"
    assert one.read() == record
    assert _content(record) == ("a", 1, 5.0)


def test_a_released_record_keeps_its_term(make: Make) -> None:
    one = make()
    first = one.replace(None, "a", 3, 5.0)
    assert _content(one.replace(first, "", 3, 5.0)) == ("", 3, 5.0)
    assert _content(make().read()) == ("", 3, 5.0)


def test_of_many_who_have_seen_the_same_one_wins(make: Make) -> None:
    registers = [make() for _ in range(6)]
    seen: LeaseRecord | None = None
    for turn in range(8):
        won: list[str] = []
        start = threading.Barrier(len(registers))

        def try_it(
            name: str, register: LeaseStore, seen: LeaseRecord | None = seen, turn: int = turn,
            start: threading.Barrier = start, won: list[str] = won,
        ) -> None:  # fmt: skip
            if register.read() != seen:
                return
            start.wait(20)
            if register.replace(seen, name, turn + 1, 5.0) is not None:
                won.append(name)

        threads = [threading.Thread(target=try_it, args=(f"p{i}", register)) for i, register in enumerate(registers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(won) == 1
        seen = registers[0].read()
        assert _content(seen)[:2] == (won[0], turn + 1)


def test_a_lease_goes_from_one_to_the_other(make: Make) -> None:
    """The rules of ``Lease`` over each register, with clocks set by hand."""
    now = {"a": 100.0, "b": 9_000.0}
    one = Lease(make(), "a", 10.0, clock=lambda: now["a"])
    two = Lease(make(), "b", 10.0, clock=lambda: now["b"])
    assert one.attempt()
    assert not two.attempt()
    assert (one.term, two.term) == (1, 0)
    for _ in range(5):
        now["a"] += 4
        now["b"] += 4
        assert one.attempt()
        assert not two.attempt(), "it is renewed"
    now["a"] += 9.4
    assert one.term == 1
    now["a"] += 0.2
    assert one.term == 0, "before the other may have it"
    now["b"] += 9.9
    assert not two.attempt()
    now["b"] += 0.2
    assert two.attempt()
    assert two.term == 2
    assert not one.attempt(), "who held it is a stand-by now"
    two.release()
    assert one.attempt()
    assert one.term == 3


def test_the_kubernetes_object_is_readable_for_people_and_keeps_what_others_put_there(server: FakeKubernetes) -> None:
    register = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account)
    first = register.replace(None, "pod-1", 4, 14.2)
    stored = server.objects["jobs", "flexd-j"]
    assert stored["spec"]["holderIdentity"] == "pod-1"
    assert stored["spec"]["leaseTransitions"] == 4
    assert stored["spec"]["leaseDurationSeconds"] == 15
    acquired = stored["spec"]["acquireTime"]
    stored["metadata"]["labels"] = {"team": "ranking"}
    register.read()
    second = register.replace(first, "pod-1", 4, 14.2)
    stored = server.objects["jobs", "flexd-j"]
    assert stored["metadata"]["labels"] == {"team": "ranking"}
    assert stored["spec"]["acquireTime"] == acquired
    assert stored["spec"]["renewTime"] > acquired
    third = register.replace(second, "pod-1", 5, 14.2)
    assert server.objects["jobs", "flexd-j"]["spec"]["acquireTime"] > acquired
    register.replace(third, "", 5, 14.2)
    assert "holderIdentity" not in server.objects["jobs", "flexd-j"]["spec"]
    register.close()


def test_a_new_token_is_used_at_once(server: FakeKubernetes) -> None:
    register = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account)
    assert register.read() is None
    server.rotate("second")
    assert register.read() is None
    (server.account / "token").write_text("wrong")
    with pytest.raises(LeaseError, match="401") as refused:
        register.read()
    assert "wrong" not in str(refused.value)
    register.close()


@pytest.mark.parametrize("status", [403, 404, 429, 500, 302])
def test_what_the_server_refuses_is_an_error_with_a_remedy(server: FakeKubernetes, status: int) -> None:
    register = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account)
    server.status = status
    if status != 404:
        with pytest.raises(LeaseError, match=str(status)):
            register.read()
    with pytest.raises(LeaseError, match=str(status)) as refused:
        register.replace(None, "a", 1, 5.0)
    assert refused.value.remedy
    register.close()


def test_a_deleted_object_is_a_conflict_and_then_nothing(server: FakeKubernetes) -> None:
    register = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account)
    first = register.replace(None, "a", 6, 5.0)
    server.objects.clear()
    assert register.replace(first, "a", 6, 5.0) is None
    assert register.read() is None
    lease = Lease(register, "b", 5.0, lowest_term=lambda: 6)
    assert lease.attempt()
    assert lease.term == 7, "terms go on where another memory has them"
    register.close()


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
    register = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account)
    register.replace(None, "a", 1, 5.0)
    server.objects["jobs", "flexd-j"] |= change
    with pytest.raises(LeaseError, match="no lease"):
        register.read()
    register.close()


def test_outside_of_a_pod_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(LeaseError, match="service account"):
        KubernetesLeaseStore("x", account=tmp_path)
    with pytest.raises(LeaseError, match="this is no pod"):
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
    register = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account, timeout_seconds=10.0)
    try:
        if known:
            assert _content(register.replace(None, "a", 1, 5.0)) == ("a", 1, 5.0)
        else:
            with pytest.raises(LeaseError, match="does not answer"):
                register.replace(None, "a", 1, 5.0)
            assert server.objects == {}
    finally:
        register.close()
        server.close()


def test_nobody_on_the_way_is_told_the_token(
    server: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.setenv(name.lower(), "http://127.0.0.1:1")
    register = KubernetesLeaseStore("flexd-j", api_url=server.url, account=server.account)
    assert register.read() is None
    (tmp_path / "other").mkdir()
    other = FakeKubernetes(tmp_path / "other")
    try:
        server.location = f"{other.url}/apis/coordination.k8s.io/v1/namespaces/jobs/leases"
        with pytest.raises(LeaseError, match="307"):
            register.replace(None, "a", 1, 5.0)
        assert (other.asked, other.objects) == (0, {})
    finally:
        register.close()
        other.close()


def test_a_server_that_hangs_is_given_up(server: FakeKubernetes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        register = KubernetesLeaseStore("x", api_url=url, account=server.account, timeout_seconds=0.1)
        with pytest.raises(LeaseError, match="does not answer"):
            register.read()
        register.close()


def test_a_server_that_is_not_there(server: FakeKubernetes, tmp_path: Path) -> None:
    register = KubernetesLeaseStore("x", api_url="http://127.0.0.1:1", account=server.account)
    with pytest.raises(LeaseError, match="does not answer"):
        register.read()
    register.close()


def test_files_of_the_directory_are_private_and_few(tmp_path: Path) -> None:
    register = FileLeaseStore(tmp_path / "lease")
    record = None
    for _ in range(30):
        record = register.replace(record, "a", 1, 5.0)
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
    register = FileLeaseStore(tmp_path)
    (tmp_path / "lease-7").write_text(content)
    with pytest.raises(LeaseError, match="lease-7 is no lease"):
        register.read()


def test_other_files_of_the_directory_are_no_leases(tmp_path: Path) -> None:
    register = FileLeaseStore(tmp_path)
    for name in ("lease-9.bak", "my-lease-9", "lease-", "lease-" + "9" * 19):
        (tmp_path / name).write_text("{}")
    assert register.read() is None
    assert _content(register.replace(None, "a", 1, 5.0)) == ("a", 1, 5.0)
    assert _content(register.read()) == ("a", 1, 5.0)


def test_a_record_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register = FileLeaseStore(tmp_path / "lease")
    done = watch_disk(monkeypatch)
    assert register.replace(None, "a", 1, 5.0) is not None
    assert done[0].startswith("sync .")
    assert done[1:] == ["name lease-1", "sync lease"]
    assert os.listdir(tmp_path / "lease") == ["lease-1"], "nothing half made stays"


def test_a_record_that_others_removed_during_a_look_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = FileLeaseStore(tmp_path)
    record = register.replace(None, "a", 1, 5.0)
    listed = [9, 9, 1]
    monkeypatch.setattr(register, "_highest", lambda: listed.pop(0))
    assert register.read() == record
    monkeypatch.setattr(register, "_highest", lambda: 9)
    with pytest.raises(LeaseError, match="changes faster"):
        register.read()


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
