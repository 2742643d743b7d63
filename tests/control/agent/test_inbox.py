"""The contract of ``ChunkInbox``: no two ranks ever apply different content for one version."""

import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from flexd.control.agent.inbox import PREPARED_BYTES, ChunkInbox
from flexd.core.errors import ChunkRefusedError, ControlError
from flexd.core.keyspace import Homes, KeySpace, TableSpec
from flexd.core.placement import Delta, Placement, RankLayout, Tier

pytestmark = pytest.mark.slow

TABLES = KeySpace([TableSpec("item", 64, 4), TableSpec("shop", 16, 8)])
LAYOUT = RankLayout(2, 2)


def delta(keys: list[int], old: int = Tier.HOME, new: int = Tier.DEVICE) -> Delta:
    return Delta(np.array(keys, dtype=np.int64), np.full(len(keys), old, np.uint8), np.full(len(keys), new, np.uint8))


@dataclass(frozen=True)
class _Prepared:
    """A prepared chunk: the keys of all chunks up to it."""

    keys: tuple[int, ...]
    nbytes: int


class Inbox(ChunkInbox):
    """An inbox whose prepared chunks have ``nbytes`` each.

    Attributes:
        made: what was prepared, in order.
        faults: raised for a chunk, by its first key.
    """

    def __init__(
        self, slots: tuple[int, int] = (80, 80), nbytes: int = 0, rank: int = 1, layout: RankLayout = LAYOUT
    ) -> None:
        super().__init__(Homes(TABLES, layout), rank, slots, lambda keys, tiers: keys >= 0, self._make)
        self.nbytes, self.made = nbytes, list[_Prepared]()
        self.faults: dict[int, Exception] = {}

    def _make(self, chunk: Delta, after: object) -> _Prepared:
        before = after.keys if isinstance(after, _Prepared) else ()
        if (fault := self.faults.get(int(chunk.keys[0]))) is not None:
            raise fault
        self.made.append(_Prepared((*before, *chunk.keys.tolist()), self.nbytes))
        return self.made[-1]

    def polled(self, max_bytes: int = 10**9) -> list[tuple[int, list[int]]]:
        """Poll, and return version and keys of each chunk."""
        return [(version, chunk.keys.tolist()) for version, chunk, _ in self.poll_agreed(max_bytes, len)]


def agree(box: ChunkInbox, lowest: int | None = None) -> None:
    announced = box.begin_exchange()
    box.end_exchange(announced if lowest is None else lowest)


def test_poll_agreed_stops_at_the_byte_cap_and_returns_at_least_one() -> None:
    box = Inbox()
    for version in range(1, 4):
        box.offer(version, delta([2 * version, 2 * version + 1]))
    agree(box)
    assert box.polled(1) == [(1, [2, 3])]
    assert box.polled(4) == [(2, [4, 5]), (3, [6, 7])]


def test_settle_drops_unagreed_chunks_and_frees_their_slots() -> None:
    box = Inbox((2, 2))
    box.offer(1, delta([4]))
    agree(box)
    box.offer(2, delta([6]))
    assert box.settle(1) == (1, Placement.empty().apply(delta([4])).digest())
    box.offer(2, delta([8]))
    with pytest.raises(ChunkRefusedError, match="replica slots"):
        box.offer(3, delta([10]))
    agree(box)
    assert box.polled() == [(1, [4]), (2, [8])]


def test_settle_waits_for_the_running_exchange() -> None:
    box = Inbox()
    box.offer(1, delta([4]))
    box.begin_exchange()
    outcome: list[tuple[int, int]] = []
    thread = threading.Thread(target=lambda: outcome.append(box.settle(10)))
    thread.start()
    time.sleep(0.05)
    assert outcome == []
    box.end_exchange(1)
    thread.join(10)
    assert outcome[0][0] == 1


def test_a_repeated_version_is_ignored() -> None:
    box = Inbox()
    box.offer(1, delta([4]))
    box.offer(1, delta([9]))
    agree(box)
    assert box.polled() == [(1, [4])]


@pytest.mark.parametrize(
    ("version", "chunk", "reason"),
    [
        (2, delta([1]), "chunk 2 after 0"),
        (1, delta([80]), "outside 0..79"),
        (1, delta([-1]), "outside 0..79"),
        (1, delta([3, 3]), "twice"),
        (1, delta([3], new=3 + 2), "a node that this job does not have"),
        (1, delta([3], new=3 + 1), "to the nodes of their homes"),
        (1, delta([3], old=7), "unknown tier"),
        (1, delta([0, 2, 4]), "needs 3 replica slots in dim-group 0, there are 2"),
        (1, delta([64, 66, 68]), "needs 3 replica slots in dim-group 1, there are 2"),
    ],
)
def test_an_invalid_chunk_changes_nothing(version: int, chunk: Delta, reason: str) -> None:
    box = Inbox((2, 2))
    with pytest.raises(ChunkRefusedError, match=reason):
        box.offer(version, chunk)
    assert box.begin_exchange() == 0
    box.end_exchange(0)
    box.offer(1, delta([0, 2]))


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        # Two are always prepared, of any size.
        (PREPARED_BYTES, 2),
        (PREPARED_BYTES // 2 + 1, 2),
        # Further ones are prepared while all of them, including the next, fit.
        (PREPARED_BYTES // 3 + 1, 2),
        (PREPARED_BYTES // 3, 3),
        (PREPARED_BYTES // 4, 4),
        (PREPARED_BYTES // 5, 5),
        (0, 9),
    ],
)
def test_chunks_are_prepared_ahead_within_the_cap(nbytes: int, expected: int) -> None:
    box = Inbox(nbytes=nbytes)
    for version in range(1, 10):
        box.offer(version, delta([2 * version]))
    assert len(box.made) == expected
    assert not box.prepare_next(), "there is no room"
    assert box.prepared_bytes == expected * nbytes
    # Only prepared chunks are announced to the peers, so no unprepared one can be agreed on.
    assert box.begin_exchange() == expected
    box.end_exchange(expected)
    polled = box.poll_agreed(10**9, len)
    assert [(version, prepared) for version, _, prepared in polled] == list(enumerate(box.made, 1))
    box.applied(expected)
    assert box.prepared_bytes == 0
    # Applied chunks make room for the rest.
    while box.prepare_next():
        pass
    assert len(box.made) == min(9, 2 * expected)
    assert [each.keys[-1] for each in box.made] == [2 * version for version in range(1, len(box.made) + 1)]


def test_a_chunk_is_prepared_from_its_predecessor_or_from_the_applied_placement() -> None:
    box = Inbox(nbytes=PREPARED_BYTES)
    for version in range(1, 4):
        box.offer(version, delta([2 * version]))
    assert [each.keys for each in box.made] == [(2,), (2, 4)]
    agree(box)
    box.polled()
    box.applied(2)
    assert box.prepare_next()
    assert box.made[-1].keys == (6,)


class SeveralInboxes(RuleBasedStateMachine):
    """Ranks step together (a real collective: all begin before any ends), and chunks arrive and epochs end and begin at
    any moment in between. A daemon numbers chunks as ``Coordinator`` does: from the agreed version, when all settled.
    """

    RANKS = 3

    @initialize()
    def begin(self) -> None:
        layout = RankLayout(self.RANKS, 1)
        self.boxes = [Inbox(rank=rank, layout=layout) for rank in range(self.RANKS)]
        self.announced: dict[int, int] = {}
        self.ended: set[int] = set()
        self.lowest = 0
        self.applied: dict[int, list[int]] = {}
        """version -> the keys of its chunk, by the rank that applied it first."""
        self.settled = dict.fromkeys(range(self.RANKS), (0, 0))
        self.log: list[Delta] = []
        """Chunks of this epoch."""
        self.base = 0
        self.position = [0] * self.RANKS
        self.open = True
        self.next_key = 0

    @rule()
    @precondition(lambda self: self.open and len(self.log) < 4)
    def push(self) -> None:
        self.log.append(delta([self.next_key % 80]))
        self.next_key += 1

    @rule(rank=st.integers(0, RANKS - 1))
    @precondition(lambda self: self.open)
    def arrive(self, rank: int) -> None:
        if self.position[rank] < len(self.log):
            self.position[rank] += 1
            self.boxes[rank].offer(self.base + self.position[rank], self.log[self.position[rank] - 1])

    @rule(rank=st.integers(0, RANKS - 1))
    def rank_begins(self, rank: int) -> None:
        if rank not in self.announced:
            self.announced[rank] = self.boxes[rank].begin_exchange()

    @rule(ranks=st.permutations(range(RANKS)))
    def all_arrive(self, ranks: list[int]) -> None:
        for rank in ranks if self.open else []:
            self.arrive(rank)

    @rule(ranks=st.permutations(range(RANKS)))
    def all_begin(self, ranks: list[int]) -> None:
        for rank in ranks:
            self.rank_begins(rank)

    @rule(rank=st.integers(0, RANKS - 1))
    @precondition(lambda self: len(self.announced) == self.RANKS)
    def rank_ends(self, rank: int) -> None:
        if rank in self.ended:
            return
        self.boxes[rank].end_exchange(min(self.announced.values()))
        for version, keys in self.boxes[rank].polled():
            assert self.applied.setdefault(version, keys) == keys, f"version {version} differs between ranks"
        self.ended.add(rank)
        if len(self.ended) == self.RANKS:
            self.announced, self.ended = {}, set()

    @rule()
    @precondition(lambda self: self.open)
    def epoch_ends(self) -> None:
        self.open = False
        self.settled = {}

    @rule(rank=st.integers(0, RANKS - 1))
    @precondition(lambda self: not self.open)
    def rank_settles(self, rank: int) -> None:
        if rank in self.settled:
            return
        box = self.boxes[rank]
        try:
            self.settled[rank] = box.settle(0.0)
        except ControlError:
            assert rank in self.announced
            assert rank not in self.ended

    @rule(ranks=st.permutations(range(RANKS)))
    @precondition(lambda self: not self.open)
    def all_settle(self, ranks: list[int]) -> None:
        for rank in ranks:
            self.rank_settles(rank)

    @rule()
    @precondition(lambda self: not self.open and len(self.settled) == self.RANKS)
    def epoch_begins(self) -> None:
        assert len(set(self.settled.values())) == 1, f"settled differently: {self.settled}"
        self.base = self.settled[0][0]
        self.log, self.position, self.open = [], [0] * self.RANKS, True

    @invariant()
    def agreed_versions_are_within_one_exchange(self) -> None:
        if hasattr(self, "boxes") and not self.announced:
            assert len({box.agreed_version for box in self.boxes}) == 1


SeveralInboxes.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestSeveralInboxes = SeveralInboxes.TestCase


def test_a_chunk_that_cannot_be_prepared_is_dropped_with_those_after_it() -> None:
    box = Inbox(nbytes=PREPARED_BYTES)
    box.faults[10] = RuntimeError("CUDA out of memory\nstack of C++")
    for key in (4, 6, 8, 10, 12):  # the first two are prepared, the others wait for room
        box.offer(key // 2 - 1, delta([key]))
    agree(box)
    assert box.polled() == [(1, [4]), (2, [6])]
    box.applied(2)
    assert box.prepare_next()
    with pytest.raises(ChunkRefusedError, match="rank 1: chunk 4 cannot be prepared: RuntimeError: CUDA out of"):
        box.prepare_next()
    assert not box.prepare_next(), "chunks 4 and 5 are dropped"
    assert box.begin_exchange() == 3
    box.end_exchange(3)
    del box.faults[10]
    with pytest.raises(ChunkRefusedError, match="chunk 5 after 3"):
        box.offer(5, delta([12]))
    box.offer(4, delta([10]))  # the refused chunk did not use up its version
    agree(box)
    assert box.polled() == [(3, [8]), (4, [10])]
