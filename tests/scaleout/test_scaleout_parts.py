"""Codec of deltas, refusals of the leader and of its listener, and a group that nothing goes wrong in."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import ScaleOutError
from flexd.core.keyspace import TableSpec
from flexd.ingest.message_counts import MessageCounts
from flexd.scaleout import count_delta as deltas
from flexd.scaleout import push_answer as answers
from flexd.scaleout import signing
from flexd.scaleout.count_delta import Delta, Stretch
from flexd.scaleout.transport import PATH, HttpLink, listener
from flexd.sketch.sketch_set import SketchSet
from tests.support.scaleout_world import KEYSPACE, SETTINGS, LeaderProcess, MemoryStore, World, payload

SECRET = b"correct horse battery staple"


def _delta(rows: list[int], stretches: dict[str, Stretch], sketches: SketchSet | None = None, **more) -> Delta:
    made = SketchSet.of(KEYSPACE.tables, SETTINGS) if sketches is None else sketches
    counts = made.ingest("item", np.array(rows, dtype=np.int64), 0, 5.0)
    meta, arrays = made.state()
    delta = Delta(
        "one", "s", 1, "job", KEYSPACE.digest, stretches, MessageCounts(1, 8, 1, counts), 0,
        tuple(stretches), False, meta, arrays,
    )  # fmt: skip
    return dataclasses.replace(delta, **more)


@pytest.fixture
def leader() -> LeaderProcess:
    made = LeaderProcess(MemoryStore())
    made.open()
    return made


def _offer(leader: LeaderProcess, delta: Delta) -> answers.Answer:
    return leader.leader.offer(deltas.encode(delta))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=30), st.integers(0, 20_000), st.sampled_from(["u4", "i8", "i4"]))
@settings(max_examples=60, deadline=None)
def test_arrays_come_back_bit_by_bit(numbers: list[int], zeros: int, dtype: str) -> None:
    rng = np.random.default_rng(len(numbers) + zeros)
    array = np.zeros(zeros + len(numbers), dtype=dtype)
    at = rng.choice(len(array), len(numbers), replace=False) if len(array) else np.empty(0, np.int64)
    array[at] = np.array(numbers, dtype=np.uint64).astype(dtype)
    sent = dataclasses.replace(_delta([1], {"p": Stretch(None, 3)}), arrays={"a": array, "b": array[:2].reshape(-1, 1)})
    got = deltas.decode(deltas.encode(sent), 2**24)
    assert {name: (a.dtype, a.shape) for name, a in got.arrays.items()} == {
        "a": (array.dtype, array.shape), "b": (array.dtype, array[:2].reshape(-1, 1).shape)
    }  # fmt: skip
    assert np.array_equal(got.arrays["a"], array)
    assert (got.stretches, got.messages, got.sketch_meta) == (sent.stretches, sent.messages, sent.sketch_meta)


def test_a_large_table_of_which_little_was_touched_is_a_small_delta() -> None:
    tables = [TableSpec("item", 10_000_000, 4)]
    sketches = SketchSet.of(tables, dataclasses.replace(SETTINGS, memory_bytes=2**26))
    assert sketches.choices()[0].kind == "dense"
    rows = np.random.default_rng(0).integers(0, 10_000_000, 100_000)
    data = deltas.encode(_delta(rows.tolist(), {"p": Stretch(None, 1)}, sketches))
    assert len(data) < 800_000
    back = deltas.decode(data, 2**28)
    again = SketchSet.from_state(tables, sketches.settings, back.sketch_meta, back.arrays)
    everything = np.arange(10_000_000)
    assert np.array_equal(again.query("item", everything), sketches.query("item", everything))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_deltas_are_refused_and_change_nothing(data: st.DataObject) -> None:
    good = bytearray(deltas.encode(_delta([1, 2], {"p": Stretch(None, 3)})))
    kind = data.draw(st.sampled_from(["cut", "changed", "random"]))
    if kind == "cut":
        bad = bytes(good[: data.draw(st.integers(0, len(good) - 1))])
    elif kind == "changed":
        good[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
        bad = bytes(good)
    else:
        bad = data.draw(st.binary(max_size=200))
    with pytest.raises(ScaleOutError) as caught:
        deltas.decode(bad, 2**24)
    assert caught.value.reason == "malformed"


def test_a_delta_that_unpacks_to_too_much_is_refused() -> None:
    arrays = {"a": np.zeros(10_000_000, dtype=np.uint32)}
    data = deltas.encode(dataclasses.replace(_delta([1], {"p": Stretch(None, 3)}), arrays=arrays))
    assert len(data) < 10_000
    with pytest.raises(ScaleOutError) as caught:
        deltas.decode(data, 39_000_000)
    assert caught.value.reason == "too_large"


def test_the_leader_takes_a_delta_once_and_only_where_it_stands(leader: LeaderProcess) -> None:
    first = _delta([3, 3], {"p": Stretch(None, 4)})
    assert _offer(leader, first).outcome == "accepted"
    again = _offer(leader, first)
    assert (again.outcome, again.positions, again.durable) == ("repeated", {"p": 4}, {})
    for stretches in ({"p": Stretch(5, 9)}, {"p": Stretch(4, 9), "q": Stretch(1, 2)}, {"q": Stretch(0, 2)}):
        refused = _offer(leader, _delta([7], stretches))
        assert (refused.outcome, refused.reason, refused.positions) == ("refused", "position", {"p": 4})
    assert leader.totals()[3] == 2
    assert sum(leader.totals()) == 2
    assert leader.ingestor._read_stats().accesses == 2
    leader.save()
    assert _offer(leader, _delta([], {}, sketch_meta={}, arrays={})).durable == {"p": 4}
    (report,) = leader.leader.followers()
    assert (report.accepted, report.repeated, report.refused) == (1, 1, {"position": 3})


def test_deltas_of_another_job_tables_or_sketches_are_refused_with_what_to_do(leader: LeaderProcess) -> None:
    other = SketchSet.of(KEYSPACE.tables, dataclasses.replace(SETTINGS, max_hot_rows=17))
    stretches = {"p": Stretch(None, 4)}
    for delta, reason, word in (
        (_delta([1], stretches, job="another"), "other_job", "another"),
        (_delta([1], stretches, tables="abcd"), "other_tables", "`tables`"),
        (_delta([1], stretches, other), "other_sketches", "`sketch`"),
    ):
        answer = _offer(leader, delta)
        assert (answer.outcome, answer.reason) == ("refused", reason)
        assert word in answer.message
    assert sum(leader.totals()) == 0
    assert leader.ledger.positions() == {}


def test_nothing_is_judged_before_the_snapshot_is_restored() -> None:
    starting = LeaderProcess(MemoryStore())
    with pytest.raises(ScaleOutError) as caught:
        _offer(starting, _delta([1], {"p": Stretch(None, 1)}))
    assert caught.value.reason == "starting"
    assert starting.leader.refused() == {"starting": 1}


def test_a_group_that_nothing_goes_wrong_in_reads_nothing_twice() -> None:
    world = World(3, 2)
    for step in range(12):
        for messages in world.log.values():
            messages += [payload(step % 5, 2)] * 3
        if step % 3 == 2:
            world.assign(step)
        world.drive()
    world.join("f2")
    for _ in range(20):
        world.drive()
    world.check()
    assert world.leader is not None
    assert world.leader.totals() == world.produced()
    assert world.leader.leader.refused() == {}
    assert [follower.follower.stats().restarts for follower in world.followers.values()] == [0, 0, 0]


def test_a_follower_stops_reading_when_too_much_has_no_answer() -> None:
    world = World(1, 1)
    world.log["p0"] += [payload(1, 1)] * 100
    follower = world.followers["f0"]
    follower.follower._options = dataclasses.replace(follower.follower._options, max_unacknowledged_messages=10)
    follower.network.up = False
    for _ in range(30):
        follower.poll(1.0)
    assert follower.follower.stats().paused
    assert 10 <= follower.source.next["p0"] < 30
    world.finish()


def test_only_signed_fresh_and_new_requests_are_taken(leader: LeaderProcess) -> None:
    http = listener(leader.leader, SECRET, "127.0.0.1", 0)
    http.start()
    try:
        data = deltas.encode(_delta([3], {"p": Stretch(None, 4)}))
        url = f"{http.address}{PATH}"

        def status(headers: dict[str, str], body: bytes = data) -> int:
            return httpx.post(url, content=body, headers=headers).status_code

        good = signing.request_headers(SECRET, "POST", PATH, data)
        assert status({}) == 401
        assert status(signing.request_headers(b"another", "POST", PATH, data)) == 401
        assert status(signing.request_headers(SECRET, "POST", PATH, data, unix_seconds=1.0)) == 401
        assert status(signing.request_headers(SECRET, "POST", "/v2", data)) == 401
        assert status(good, data[:-1] + b"x") == 401
        assert leader.ledger.positions() == {}
        assert status(good) == 401, "its nonce is used up by the request with another body"
        assert status(signing.request_headers(SECRET, "POST", PATH, data)) == 200
        assert leader.ledger.positions() == {"p": 4}
        limit, leader.leader.max_unpacked_bytes = leader.leader.max_unpacked_bytes, 10
        assert status(signing.request_headers(SECRET, "POST", PATH, data)) == 413
        leader.leader.max_unpacked_bytes = limit
        refused = {"unsigned": 1, "bad_signature": 3, "stale": 1, "replayed": 1, "too_large": 1}
        assert leader.leader.refused() == refused
        with pytest.raises(ScaleOutError) as caught:
            HttpLink("127.0.0.1", http.port, b"another").offer(data)
        assert caught.value.reason in ("bad_signature", "unsigned")
        assert HttpLink("127.0.0.1", http.port, SECRET).offer(data).outcome == "repeated"
    finally:
        assert http.stop(5.0)


@pytest.mark.parametrize("wrong_seconds", [-88_371.0, 88_371.0])
def test_clocks_that_are_apart_or_set_keep_no_counts_back(
    leader: LeaderProcess, monkeypatch: pytest.MonkeyPatch, wrong_seconds: float
) -> None:
    http = listener(leader.leader, SECRET, "127.0.0.1", 0)
    http.start()
    right = time.time

    def stale() -> int:
        return leader.leader.refused().get("stale", 0)

    try:
        with monkeypatch.context() as on_the_follower:
            on_the_follower.setattr(time, "time", lambda: right() + wrong_seconds)
            link = HttpLink("127.0.0.1", http.port, SECRET)
        data = deltas.encode(_delta([3], {"p": Stretch(None, 4)}))
        assert link.offer(data).outcome == "accepted"
        assert stale() == 1, "the refusal says what time it is"
        assert link.offer(data).outcome == "repeated"
        assert stale() == 1, "and is asked once"
        # Now the clock of both is set, and a link is made after.
        monkeypatch.setattr(time, "time", lambda: right() - wrong_seconds)
        assert link.offer(data).outcome == "repeated"
        assert stale() == 1
        assert HttpLink("127.0.0.1", http.port, SECRET).offer(data).outcome == "repeated"
        assert stale() == 2
    finally:
        assert http.stop(5.0)


def test_a_calendar_that_is_set_and_set_back_lets_no_recorded_request_in(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, right = signing.RequestVerifier(SECRET), time.time
    recorded = signing.request_headers(SECRET, "POST", PATH, b"")
    verifier.check("POST", PATH, recorded, 0)
    for apart in (1e6, 0.0):
        monkeypatch.setattr(time, "time", lambda apart=apart: right() + apart)
        with contextlib.suppress(ScaleOutError):
            verifier.check("POST", PATH, signing.request_headers(SECRET, "POST", PATH, b""), 0)
    with pytest.raises(ScaleOutError) as caught:
        verifier.check("POST", PATH, recorded, 0)
    assert caught.value.reason == "replayed"


def test_a_leader_that_is_away_or_another_server_is_an_error_in_time() -> None:
    with pytest.raises(ScaleOutError) as caught:
        HttpLink("127.0.0.1", 1, SECRET, attempt_seconds=2.0).offer(b"x")
    assert caught.value.reason == "unreachable"


def test_answers_of_any_thread_are_equal(leader: LeaderProcess) -> None:
    """Twenty deltas of one stretch at one time: one is counted."""
    data = deltas.encode(_delta([9], {"p": Stretch(None, 1)}))
    outcomes: list[str] = []
    threads = [threading.Thread(target=lambda: outcomes.append(leader.leader.offer(data).outcome)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(outcomes) == ["accepted"] + ["repeated"] * 19
    assert leader.totals()[9] == 1
