"""Registrations of ranks: attempts, sessions, silence and refusals."""

from dataclasses import replace

import pytest

from flexd.control.daemon.membership import MAX_ATTEMPTS, MAX_REFUSALS, Membership
from flexd.control.protocol.messages import Hello, RankIdentity, TableList
from flexd.control.protocol.report import PlacementState, TrainerSettings, tables_body
from flexd.core.errors import TopologyError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import RankLayout
from tests.support.rank_pool import error_of

TABLES = KeySpace([TableSpec("items", 2_000, 8), TableSpec("users", 500, 16)])


def hello(rank: int, attempt: str = "a1", session: str = "", nonce: str = "", **more: object) -> Hello:
    identity = RankIdentity("job", attempt, rank, 2, 2, (10 + rank, 20), TABLES.digest)
    session, nonce = session or f"{attempt}-{rank}", nonce or f"n{attempt}-{rank}"
    address = str(more.pop("address", ""))
    return Hello(replace(identity, **more), "i", session, nonce, PlacementState(0, 0), address)  # type: ignore[arg-type]


def new_membership() -> Membership:
    return Membership("job", TABLES, silent_seconds=10.0, replace_seconds=3.0)


def full(ranks: Membership | None = None, attempt: str = "a1", now: float = 0.0) -> Membership:
    """Register all ranks of an attempt, with a new membership if none is given."""
    ranks = ranks or new_membership()
    for rank in range(4):
        assert ranks.accept(hello(rank, attempt), now)
    return ranks


def test_a_topology_is_complete_when_all_ranks_are_registered() -> None:
    ranks = new_membership()
    for rank in (2, 0, 3):
        assert ranks.accept(hello(rank), 0.0)
        assert not ranks.accept(hello(rank), 0.0), "a repeated hello changes nothing"
        assert ranks.accept(hello(rank, nonce="other"), 0.0)
        assert ranks.complete() is None
    assert ranks.present() == ("a1", 3, 4, (1,))
    ranks.accept(hello(1), 0.0)
    topology = ranks.complete()
    assert [h.identity.rank for h in topology.hellos] == [0, 1, 2, 3]
    assert (topology.layout, topology.replica_slots) == (RankLayout(2, 2), (10, 20))


def test_what_the_trainer_says_of_itself_is_that_of_rank_0_and_is_checked() -> None:
    ranks = new_membership()
    assert "its pooling 'orr' or read-only tables '' are not of 2 tables" in error_of(
        ranks.accept, hello(0, trainer=TrainerSettings(pooling="orr")), 0.0
    )
    for rank in range(4):
        ranks.accept(hello(rank, trainer=TrainerSettings("chain", pooling="-r")), 0.0)
    assert ranks.complete().trainer == TrainerSettings("chain", pooling="-r")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"job": "other"}, "serves job"),
        ({"attempt": ""}, "an attempt's name of 0"),
        ({"attempt": "x" * 201}, "an attempt's name of 201"),
        ({"table_digest": "x"}, "tables differ: digest x here"),
        ({"replica_slots": (1,)}, "dim-groups"),
        ({"rank": 4}, "rank 4 of 2 nodes"),
        ({"rank": -1}, "rank -1"),
        ({"nodes": -2, "local_ranks": -2}, "-2 nodes x -2 local ranks is not possible"),
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
    ranks = full()
    before = ranks.complete()
    ranks.mark_heard("a1", 0, 5.0)
    assert "TopologyError" in error_of(ranks.accept, hello(0, session="new"), 7.0)
    assert ranks.accept(hello(0, session="new", nonce="new"), 8.5)
    after = ranks.complete()
    assert before and after and before.identity != after.identity  # noqa: PT018


def test_silent_ranks_expire_unless_the_daemon_was_stopped() -> None:
    ranks = full()
    ranks.mark_heard("a1", 1, 9.0)
    ranks.excuse_silence(5.0)
    assert ranks.expire(14.0) == []
    assert [h.identity.rank for h in ranks.expire(16.0)] == [0, 2, 3]
    assert ranks.present() == ("a1", 1, 4, (0, 2, 3))
    assert len(ranks.expire(100.0)) == 1
    assert ranks.present() == ("", 0, 0, ())


def heard(ranks: Membership, now: float) -> None:
    """Mark all ranks of the first attempt as heard, and expire the silent ones of others."""
    for rank in range(4):
        ranks.mark_heard("a1", rank, now)
    ranks.expire(now)


def debug_run(attempt: str = "debug") -> Hello:
    """The hello of a run of one process."""
    return hello(0, attempt, nodes=1, local_ranks=1, address="10.0.0.9")


def attempt_of(ranks: Membership) -> str | None:
    topology = ranks.complete()
    return None if topology is None else topology.attempt


def test_a_run_of_one_process_does_not_evict_an_attempt_whose_ranks_are_alive() -> None:
    ranks = Membership("job", TABLES, silent_seconds=10.0, replace_seconds=3.0, wall_clock=lambda: 1_700_000_000.0)
    for rank in range(4):
        ranks.accept(hello(rank, address=f"10.0.0.{rank}"), 0.0)
    assert attempt_of(ranks) == "a1"
    for second in range(1, 30):
        for rank in range(4):
            ranks.mark_heard("a1", rank, float(second))
        with pytest.raises(TopologyError) as refused:
            ranks.accept(debug_run(), float(second))
        ranks.expire(float(second))
        assert attempt_of(ranks) == "a1"
    assert refused.value.message == (
        "attempt 'a1' holds job 'job': 4 ranks, since 2023-11-14T22:13:20Z, on 10.0.0.0, 10.0.0.1, 10.0.0.2 and 1 more"
    )
    assert ranks.waiting() == 1
    for number in range(2 * MAX_REFUSALS):
        assert "TopologyError" in error_of(ranks.accept, debug_run(attempt=f"d{number}"), 29.0)
    assert ranks.waiting() == MAX_REFUSALS
    heard(ranks, 40.0)
    assert ranks.waiting() == 0


def test_the_next_attempt_gets_the_job_once_no_rank_is_heard() -> None:
    ranks = full()
    assert attempt_of(ranks) == "a1"
    with pytest.raises(TopologyError):
        full(ranks, "a2", 1.0)
    ranks.expire(10.5)
    assert ranks.waiting() == 0
    full(ranks, "a2", 10.5)
    assert attempt_of(ranks) == "a2"
    # It was cut off and is heard again: refused while the other holds the job, and not for good.
    assert "attempt 'a2' holds job 'job'" in error_of(ranks.accept, hello(0, "a1"), 11.0)
    ranks.expire(21.0)
    full(ranks, "a1", 21.0)
    assert attempt_of(ranks) == "a1"


def test_after_a_restart_of_the_daemon_the_attempt_before_has_time_to_come_back() -> None:
    ranks = new_membership()
    ranks.expect("a1", 100.0)
    ranks.expire(101.0)
    assert "attempt 'a1' held job 'job' when the daemon started; its ranks have 7 s" in error_of(
        ranks.accept, debug_run(), 103.0
    )
    full(ranks, "a1", 104.0)
    assert attempt_of(ranks) == "a1"
    heard(ranks, 112.0)
    assert "attempt 'a1' holds" in error_of(ranks.accept, debug_run(), 112.0)
    gone = new_membership()
    gone.expect("a1", 100.0)
    gone.excuse_silence(5.0)
    gone.expire(114.0)
    assert "TopologyError" in error_of(gone.accept, debug_run(), 114.0)
    gone.expire(115.5)
    assert gone.accept(debug_run(), 115.5)
    assert attempt_of(gone) == "debug"


def test_a_live_attempt_with_one_silent_rank_outlives_incomplete_attempts() -> None:
    """An attempt is silent since its latest message from any rank, not from the first or the quietest rank."""
    ranks = full(attempt="live")
    for second in range(1, 10):
        for rank in (0, 1, 3):
            ranks.mark_heard("live", rank, float(second))
        # One other attempt registers per second: after the last message of rank 2 of the live attempt, before its
        # others.
        ranks.accept(hello(0, f"other{second}"), second - 0.5)
    assert len(ranks._attempts) == MAX_ATTEMPTS
    assert attempt_of(ranks) == "live"


def test_a_refused_rank_is_listed_with_its_reason_until_it_is_accepted_or_silent() -> None:
    ranks = new_membership()
    trainer_tables = [TableSpec("items", 3_000, 8), TableSpec("users", 500, 16)]
    digest = KeySpace(trainer_tables).digest
    ranks.tables.record_tables(TableList("i", digest), tables_body(trainer_tables))
    for rank, now in ((1, 0.0), (0, 1.0), (1, 2.0)):
        with pytest.raises(
            TopologyError, match=r"items\.rows: 3000 in the trainer, 2000 in the daemon's configuration"
        ):
            ranks.accept(hello(rank, table_digest=digest), now)
    assert [(refused.attempt, refused.rank) for refused in ranks.refused()] == [("a1", 1), ("a1", 0)]
    assert str(ranks.refused()[0]) == (
        "rank 1 of attempt 'a1' is refused: the tables differ: items.rows: 3000 in the trainer, 2000 in the daemon's "
        "configuration"
    )
    assert ranks.present() == ("", 0, 0, ())
    assert ranks.accept(hello(1), 3.0)
    assert [refused.rank for refused in ranks.refused()] == [0]
    ranks.expire(11.0)
    assert [refused.rank for refused in ranks.refused()] == [0]
    ranks.expire(11.5)
    assert ranks.refused() == ()


def test_stored_refusals_are_bounded() -> None:
    ranks = new_membership()
    for number in range(MAX_REFUSALS + 5):
        assert "TopologyError" in error_of(ranks.accept, hello(0, f"a{number}", job="other"), float(number))
    assert [refused.attempt for refused in ranks.refused()] == [f"a{n}" for n in range(MAX_REFUSALS + 4, 4, -1)]


def test_a_disconnected_rank_is_absent_until_it_registers_again_and_soon_lost() -> None:
    ranks = full()
    assert ranks.complete() is not None
    for rank in (1, 2):
        assert ranks.mark_disconnected(hello(rank), 1.0)
    assert not ranks.mark_disconnected(hello(3, nonce="an older registration"), 1.0)
    assert not ranks.mark_disconnected(hello(3, "a2"), 1.0)
    assert ranks.complete() is None
    assert ranks.present() == ("a1", 2, 4, (1, 2))
    ranks.accept(hello(1, nonce="again"), 2.0)
    assert ranks.expire(3.9) == []
    assert [h.identity.rank for h in ranks.expire(4.1)] == [2]
    ranks.accept(hello(2, nonce="again"), 5.0)
    assert ranks.complete() is not None
    assert ranks.present() == ("a1", 4, 4, ())
