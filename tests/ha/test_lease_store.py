"""Conformance of every lease store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexd.ha.file_store import FileLeaseStore
from flexd.ha.kubernetes_store import KubernetesLeaseStore
from flexd.ha.lease import Lease
from flexd.ha.lease_store import LeaseRecord, LeaseStore
from tests.support.fake_kubernetes import FakeKubernetes

Make = Callable[[], LeaseStore]


@pytest.fixture(params=["file", "kubernetes"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Return a function that opens one more store over the same record, as another process would."""
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


def test_a_written_record_is_read_by_every_store(make: Make) -> None:
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
    assert two.compare_and_set(first, "b", 9, 5.0) is None, "a record replaced long ago is not accepted either"
    assert one.read() == record
    assert _content(record) == ("a", 1, 5.0)


def test_a_released_record_keeps_its_term(make: Make) -> None:
    one = make()
    first = one.compare_and_set(None, "a", 3, 5.0)
    assert _content(one.compare_and_set(first, "", 3, 5.0)) == ("", 3, 5.0)
    assert _content(make().read()) == ("", 3, 5.0)


def test_of_concurrent_writers_with_the_same_record_one_succeeds(make: Make) -> None:
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


def test_a_lease_passes_from_one_process_to_another(make: Make) -> None:
    """The rules of ``Lease`` over each store, with fake clocks."""
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
        assert not two.acquire_or_renew(), "the lease was renewed"
    now["a"] += 9.4
    assert one.term == 1
    now["a"] += 0.2
    assert one.term == 0, "it ends before another process may acquire it"
    now["b"] += 9.9
    assert not two.acquire_or_renew()
    now["b"] += 0.2
    assert two.acquire_or_renew()
    assert two.term == 2
    assert not one.acquire_or_renew(), "the old holder is a stand-by"
    two.release()
    assert one.acquire_or_renew()
    assert one.term == 3
