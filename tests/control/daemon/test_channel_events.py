"""Unread events are received in turns, and their bytes are bounded by peer and in total."""

from __future__ import annotations

import threading

import pytest

from flexd.control.daemon.channel_events import (
    EVENT_BYTES,
    PEER_SHARE_BYTES,
    ChannelOptions,
    Closed,
    Received,
    UnreadEvents,
)
from tests.support.until import until

OPTIONS = ChannelOptions(peer_unread_bytes=100_000, unread_bytes=150_000)


class Unread(UnreadEvents):
    def __init__(self) -> None:
        self.rooms = 0
        super().__init__(OPTIONS, self._room)

    def _room(self) -> None:
        self.rooms += 1


@pytest.fixture
def unread() -> Unread:
    return Unread()


def add(unread: Unread, peer: int, name: str, nbytes: int = 0) -> None:
    unread.add(Received(peer, name.encode(), b""), nbytes)


def names(unread: Unread, limit: int = 100) -> list[str]:
    return [event.message.decode() for event in unread.receive(limit, 0) if isinstance(event, Received)]


def test_peers_take_turns_and_each_ones_events_stay_in_order(unread: Unread) -> None:
    for name in ("a1", "a2", "a3", "b1", "c1", "c2"):
        add(unread, ord(name[0]), name)
    assert unread.peers == 3
    assert names(unread, 4) == ["a1", "b1", "c1", "a2"]
    add(unread, ord("b"), "b2")
    assert names(unread) == ["c2", "a3", "b2"]
    assert (unread.peers, unread.nbytes) == (0, 0)


def test_a_peer_is_read_up_to_its_bound_and_again_after_a_receive(unread: Unread) -> None:
    while unread.has_room(1, 20_000):
        add(unread, 1, "x", 20_000)
    assert 100_000 <= unread.nbytes < 120_000 + 6 * EVENT_BYTES
    assert unread.has_room(2, 20_000)
    assert unread.rooms == 0
    names(unread, 3)
    assert unread.rooms == 1
    assert unread.has_room(2, 30_000), "the next in turn"
    names(unread)
    assert unread.rooms == 1


def test_each_peer_keeps_its_own_share_when_the_total_is_used_up(unread: Unread) -> None:
    for peer in (1, 2):
        add(unread, peer, "x", 95_000)
    assert not unread.has_room(1, 1)
    assert not unread.has_room(3, PEER_SHARE_BYTES + 1)
    assert unread.has_room(3, PEER_SHARE_BYTES)
    add(unread, 3, "x", PEER_SHARE_BYTES - EVENT_BYTES)
    assert not unread.has_room(3, 1)


def test_a_frame_beyond_the_bound_of_all_gets_in_alone(unread: Unread) -> None:
    assert unread.has_room(3, 200_000)
    add(unread, 1, "x", PEER_SHARE_BYTES)
    assert not unread.has_room(3, 200_000)


def test_small_frames_do_not_starve_a_large_one(unread: Unread) -> None:
    """Whoever is read first after each receive: what is freed stays free until the frame that waits longest fits."""
    small = range(1, 11)
    for peer in small:
        add(unread, peer, "x", 30_000)
    assert not unread.has_room(99, 120_000), "the large frame"
    for _ in small:
        names(unread, 1)
        if unread.has_room(99, 120_000):
            break
        for peer in small:
            if unread.has_room(peer, 30_000):
                add(unread, peer, "x", 30_000)
            assert unread.has_room(peer + 20, PEER_SHARE_BYTES), "its own share"
    assert unread.has_room(99, 120_000)
    add(unread, 99, "large", 120_000)
    unread.add(Closed(1, "disconnected"))
    assert "large" in names(unread)
    assert unread.has_room(2, 30_000), "the next in turn"


def test_a_receive_waits_for_an_event_a_wake_or_its_timeout(unread: Unread) -> None:
    assert unread.receive(1, 0.01) == []
    unread.wake()
    assert unread.receive(1, 60) == []
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.extend(unread.receive(1, 60)))
    thread.start()
    unread.add(Closed(1, "disconnected"))
    until(lambda: found == [Closed(1, "disconnected")])
    thread.join()
