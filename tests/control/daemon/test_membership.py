"""Registrations of ranks: attempts, sessions, silence and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexd.control.daemon import membership
from flexd.control.daemon.membership import MAX_ATTEMPTS, MAX_REFUSALS, Membership
from flexd.control.protocol.messages import Hello
from flexd.control.protocol.table_lists import table_entries
from flexd.core.errors import ReplayedMessageError, TopologyError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout

TABLES = KeySpace([TableSpec("items", 2_000, 8), TableSpec("users", 500, 16)])


def hello(
    rank: int, attempt: str = "a1", session: str = "", sequence: int = 1, nonce: str = "", **more: object
) -> Hello:
    base = Hello(
        "job", "i", attempt, rank, 4, 2, 2, (10 + rank, 20), TABLES.digest, session or f"{attempt}-{rank}",
        nonce or f"n{attempt}-{rank}", sequence, 0, 0, "127.0.0.1", True, (), len(TABLES.tables),
    )  # fmt: skip
    return replace(base, **more)  # type: ignore[arg-type]


def new_membership() -> Membership:
    return Membership("job", TABLES, silent_seconds=10.0, replace_seconds=3.0)


def full(ranks: Membership, attempt: str = "a1", now: float = 0.0) -> None:
    for rank in range(4):
        ranks.accept(hello(rank, attempt), now)


def test_a_topology_is_complete_when_all_ranks_are_registered() -> None:
    ranks = new_membership()
    for rank in (2, 0, 3):
        assert ranks.accept(hello(rank), 0.0)
        assert ranks.complete() is None
    assert ranks.present() == ("a1", 3, 4, (1,))
    ranks.accept(hello(1), 0.0)
    topology = ranks.complete()
    assert topology is not None
    assert [h.rank for h in topology.hellos] == [0, 1, 2, 3]
    assert (topology.layout, topology.replica_slots) == (RankLayout(2, 2), (10, 20))


def test_a_repeated_hello_changes_nothing_and_a_new_nonce_is_accepted() -> None:
    ranks = new_membership()
    assert ranks.accept(hello(0), 0.0)
    assert not ranks.accept(hello(0, sequence=2), 1.0)
    assert ranks.accept(hello(0, sequence=3, nonce="other"), 1.0)
    with pytest.raises(ReplayedMessageError):
        ranks.accept(hello(0, sequence=3), 1.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"job": "other"}, "serves job"),
        ({"table_digest": "x"}, "tables differ: digest x here"),
        ({"replica_slots": (1,)}, "dim-groups"),
        ({"rank": 4}, "rank 4 of 4"),
        ({"rank": -1}, "rank -1"),
        ({"world_size": 0}, "of 0 is not possible"),
        ({"world_size": 6}, "are not 6 ranks"),
        ({"nodes": -2, "local_ranks": -2}, "not 4 ranks"),
        ({"nodes": 1, "local_ranks": 4}, "rank 0 of this attempt has 2 x 2"),
        ({"rank": 0, "session": "other"}, "another process is rank 0"),
    ],
)
def test_contradictions_are_refused_with_the_reason(change: dict[str, object], reason: str) -> None:
    ranks = new_membership()
    ranks.accept(hello(0), 0.0)
    with pytest.raises(TopologyError, match=reason):
        ranks.accept(hello(1, **change) if "rank" not in change else hello(**change), 0.0)  # type: ignore[arg-type]
    assert ranks.present() == ("a1", 1, 4, (1, 2, 3))


def test_a_new_process_takes_a_silent_ranks_place() -> None:
    ranks = new_membership()
    full(ranks)
    before = ranks.complete()
    ranks.mark_heard("a1", 0, 5.0)
    with pytest.raises(TopologyError):
        ranks.accept(hello(0, session="new"), 7.0)
    assert ranks.accept(hello(0, session="new", nonce="new"), 8.5)
    after = ranks.complete()
    assert before is not None
    assert after is not None
    assert before.identity != after.identity


def test_a_recorded_hello_is_refused_long_after_its_process_ended() -> None:
    ranks = new_membership()
    full(ranks)
    recorded = hello(2)
    assert len(ranks.expire(100.0)) == 4
    with pytest.raises(ReplayedMessageError, match="hello 1 of rank 2 after 1"):
        ranks.accept(recorded, 100.0)
    assert ranks.present() == ("", 0, 0, ())
    assert ranks.accept(hello(2, sequence=2), 100.0)
    assert ranks.accept(hello(2, session="its successor", nonce="new"), 110.0)
    with pytest.raises(ReplayedMessageError):
        ranks.accept(hello(2, sequence=2), 120.0)


def test_stored_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_SESSIONS", 3)
    ranks = new_membership()
    for session in range(10):
        ranks.accept(hello(0, session=f"s{session}"), 10.0 * session)
    assert list(ranks._newest) == ["s7", "s8", "s9"]


def test_a_session_that_still_sends_stays_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_SESSIONS", 2)
    ranks = new_membership()
    for turn in range(1, 4):
        ranks.accept(hello(0, session="s", sequence=turn), float(turn))
        ranks.accept(hello(1, session=f"other{turn}"), 100.0 * turn)
        assert ranks._newest["s"] == turn


def test_silent_ranks_expire_unless_the_daemon_was_stopped() -> None:
    ranks = new_membership()
    full(ranks)
    ranks.mark_heard("a1", 1, 9.0)
    ranks.excuse_silence(5.0)
    assert ranks.expire(14.0) == []
    assert [h.rank for h in ranks.expire(16.0)] == [0, 2, 3]
    assert ranks.present() == ("a1", 1, 4, (0, 2, 3))
    assert len(ranks.expire(100.0)) == 1
    assert ranks.present() == ("", 0, 0, ())


def test_a_newer_complete_attempt_ends_the_older_for_good() -> None:
    ranks = new_membership()
    full(ranks)
    for rank in range(3):
        ranks.accept(hello(rank, "a2"), 1.0)
    topology = ranks.complete()
    assert topology is not None
    assert topology.attempt == "a1"
    ranks.accept(hello(3, "a2"), 1.0)
    topology = ranks.complete()
    assert topology is not None
    assert topology.attempt == "a2"
    with pytest.raises(TopologyError, match="replaced by a newer one"):
        ranks.accept(hello(0, "a1", sequence=9), 2.0)


def test_beyond_the_limit_the_longest_silent_attempt_is_dropped() -> None:
    ranks = new_membership()
    for number in range(MAX_ATTEMPTS):
        ranks.accept(hello(0, f"a{number}"), float(number))
    # a0 registered first, but a1 has been silent for longest.
    ranks.mark_heard("a0", 0, 8.5)
    for number in range(MAX_ATTEMPTS, MAX_ATTEMPTS + 3):
        ranks.accept(hello(0, f"a{number}"), 8.5 + number)
    assert list(ranks._attempts) == ["a0", *(f"a{number}" for number in range(4, MAX_ATTEMPTS + 3))]
    assert ranks.present() == (f"a{MAX_ATTEMPTS + 2}", 1, 4, (1, 2, 3))


def test_a_live_attempt_with_one_silent_rank_outlives_incomplete_attempts() -> None:
    """An attempt is silent since its latest message from any rank, not from the first or the quietest rank."""
    ranks = new_membership()
    full(ranks, "live", 0.0)
    for second in range(1, 10):
        for rank in (0, 1, 3):
            ranks.mark_heard("live", rank, float(second))
        # One other attempt registers a second: after the last message of rank 2 of the live attempt, before its others.
        ranks.accept(hello(0, f"other{second}"), second - 0.5)
    assert len(ranks._attempts) == MAX_ATTEMPTS
    topology = ranks.complete()
    assert topology is not None
    assert topology.attempt == "live"
    assert len(topology.hellos) == 4


def test_a_refused_rank_is_listed_with_its_reason_until_it_is_accepted_or_silent() -> None:
    ranks = new_membership()
    trainer_tables = [TableSpec("items", 3_000, 8), TableSpec("users", 500, 16)]
    other = {"table_digest": KeySpace(trainer_tables).digest, "tables": table_entries(trainer_tables)}
    for rank, now in ((1, 0.0), (0, 1.0), (1, 2.0)):
        with pytest.raises(
            TopologyError, match=r"items\.rows: 3000 in the trainer, 2000 in the daemon's configuration"
        ):
            ranks.accept(hello(rank, **other), now)  # type: ignore[arg-type]
    assert [(refused.attempt, refused.rank) for refused in ranks.refused()] == [("a1", 1), ("a1", 0)]
    assert str(ranks.refused()[0]) == (
        "rank 1 of attempt 'a1' is refused: the tables differ: items.rows: 3000 in the trainer, 2000 in the daemon's "
        "configuration"
    )
    assert ranks.present() == ("", 0, 0, ())
    assert ranks.accept(hello(1, sequence=2), 3.0)
    assert [refused.rank for refused in ranks.refused()] == [0]
    ranks.expire(11.0)
    assert [refused.rank for refused in ranks.refused()] == [0]
    ranks.expire(11.5)
    assert ranks.refused() == ()


def test_stored_refusals_are_bounded() -> None:
    ranks = new_membership()
    for number in range(MAX_REFUSALS + 5):
        with pytest.raises(TopologyError):
            ranks.accept(hello(0, f"a{number}", job="other"), float(number))
    assert [refused.attempt for refused in ranks.refused()] == [f"a{n}" for n in range(MAX_REFUSALS + 4, 4, -1)]
