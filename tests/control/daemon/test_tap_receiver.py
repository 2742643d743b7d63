"""Counted accesses from outbox to source: real agents and connections, one coordinator after another."""

import contextlib
import threading
import time
from collections.abc import Callable

import pytest

from flexd.control.agent import tap_outbox as tap_sender
from flexd.control.agent.channel_client import ChannelClient
from flexd.control.agent.rank_connection import RankConnection
from flexd.control.agent.tap_outbox import TapOutbox
from flexd.control.daemon import tap_receiver
from flexd.control.daemon.channel_events import ChannelOptions
from flexd.control.protocol.handshake import ChannelCredentials
from flexd.control.protocol.messages import PIECE_BYTES, ControlMessage, TapPiece, encode
from flexd.core.placement import RankLayout
from flexd.core.tap_counts import FORMAT
from flexd.stream.tap_source import TapSource
from tests.support.ranks_in_threads import SECRET, Ranks
from tests.support.until import until

TWO = RankLayout(1, 2)


class Daemon:
    """A coordinator with a tap, and a reader that counts what it polls and commits on request."""

    def __init__(self, hosted: object, source: TapSource, positions: dict[str, int]) -> None:
        self.hosted, self.source = hosted, source
        source.restore(positions)
        self.counted: list[tuple[str, int, bytes]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._stop.is_set():
            self.counted += [(m.partition, m.offset, bytes(m.payload)) for m in self.source.poll(0.02)]

    def snapshot(self) -> dict[str, int]:
        positions = self.source.positions()
        self.source.commit(positions)
        return positions

    def kill(self) -> int:
        """Stop without saving anything, free the port and return it."""
        self._stop.set()
        self._thread.join(10)
        self.hosted.close()
        return self.hosted.port


@pytest.fixture
def daemon(host: Callable[..., object]) -> Callable[..., Daemon]:
    def make(positions: dict[str, int] | None = None, **options: object) -> Daemon:
        source = TapSource()
        return Daemon(host(tap=source, **options), source, positions or {})

    return make


class TappedRanks(Ranks):
    """Ranks with an outbox each."""

    def __init__(self, port: int) -> None:
        super().__init__(port, TWO)
        self.outboxes = [TapOutbox() for _ in self.ranks]
        for rank, outbox in zip(self.ranks, self.outboxes, strict=True):
            rank.agent.outbox = outbox

    def partition(self, rank: int) -> str:
        return f"tap/a1/{rank}/{self.ranks[rank].agent.session}"


def test_payloads_of_any_size_arrive_complete_and_stay_in_the_outbox_until_the_snapshot(daemon):
    harness = daemon()
    with TappedRanks(harness.hosted.port) as ranks:
        sizes = (1, 3 * PIECE_BYTES + 5)
        for outbox, size in zip(ranks.outboxes, sizes, strict=True):
            outbox.put(bytes(i % 251 for i in range(1000)) * (size // 1000) + b"!" * (size % 1000))
        payloads = [outbox.counts.payload for outbox in ranks.outboxes]
        until(lambda: len(harness.counted) == 2, what=ranks.state())
        assert sorted(harness.counted) == sorted((ranks.partition(r), 0, payloads[r]) for r in range(2))
        time.sleep(0.1)
        assert not any(outbox.free for outbox in ranks.outboxes), "no snapshot holds the payloads"
        harness.snapshot()
        until(lambda: all(outbox.free for outbox in ranks.outboxes))
        assert [outbox.acknowledged for outbox in ranks.outboxes] == [1, 1]
        assert ranks.outboxes[0].put(b"next") == 1
        until(lambda: len(harness.counted) == 3)
        assert harness.counted[-1] == (ranks.partition(0), 1, b"next")


def test_a_payload_is_sent_again_only_if_the_daemon_dies_before_its_snapshot(daemon):
    first = daemon()
    with TappedRanks(first.hosted.port) as ranks:
        zero, one = ranks.outboxes
        zero.put(b"in the snapshot")
        until(lambda: len(first.counted) == 1)
        saved = first.source.positions()  # durable, and not reported to the ranks: the daemon dies in between
        one.put(b"in no snapshot")
        until(lambda: len(first.counted) == 2)
        second = daemon(saved, port=first.kill())
        until(lambda: zero.free, what=ranks.state())
        until(lambda: len(second.counted) == 1)
        assert second.counted == [(ranks.partition(1), 0, b"in no snapshot")]
        second.snapshot()
        until(lambda: one.free)
        assert second.source.losses().messages == {}


def test_ranks_that_send_at_once_stay_below_the_channels_bound_of_partial_frames():
    assert ChannelOptions().partial_bytes > tap_receiver.MAX_GRANTED_BYTES


def test_counts_of_a_format_that_the_daemon_does_not_read_stay_in_the_outbox(daemon, monkeypatch):
    monkeypatch.setattr(tap_sender, "FORMAT", FORMAT + 1)
    first = daemon()
    with TappedRanks(first.hosted.port) as ranks:
        outbox = ranks.outboxes[0]
        outbox.put(b"of a newer trainer")
        until(lambda: "upgrade the daemon" in outbox.problem, what=ranks.state())
        assert f"format {FORMAT + 1}, this daemon reads {FORMAT} to {FORMAT}" in outbox.problem
        assert first.counted == []
        port = first.kill()
        monkeypatch.setattr(tap_receiver, "NEWEST_FORMAT", FORMAT + 1)
        second = daemon(port=port)
        until(lambda: second.counted == [(ranks.partition(0), 0, b"of a newer trainer")], what=ranks.state())


def test_a_piece_of_another_length_is_counted_and_the_payload_arrives_complete(daemon, monkeypatch):
    harness = daemon()
    broken = [0]
    send = RankConnection._send

    def send_shortened(connection: RankConnection, message: ControlMessage, body: bytes = b"") -> None:
        if isinstance(message, TapPiece) and broken[0] < 2:
            broken[0] += 1
            body = body[:-1]
        send(connection, message, body)

    monkeypatch.setattr(RankConnection, "_send", send_shortened)
    with TappedRanks(harness.hosted.port) as ranks:
        ranks.outboxes[0].put(b"the original")
        until(lambda: len(harness.counted) == 1, what=ranks.state())
        assert harness.counted[0][2] == b"the original"
        assert harness.hosted.coordinator.status().refused_messages["malformed"] == 2
        assert harness.hosted.coordinator.status().epochs == 1, "no rank was disturbed"


def test_pieces_that_were_not_requested_are_dropped(daemon):
    """Neither another proven connection nor the rank's own delivers a payload that no grant asked for."""
    harness = daemon()
    raw = ChannelClient.connect("127.0.0.1", harness.hosted.port, ChannelCredentials(SECRET), 30.0)
    with TappedRanks(harness.hosted.port) as ranks, contextlib.closing(raw):
        until(harness.hosted.ready)
        fence = harness.hosted.coordinator.epoch.fence
        raw.send(encode(TapPiece(fence, 1)), b"not requested")
        client = ranks.ranks[0].agent.client
        ranks.outboxes[0].put(b"authentic")
        until(lambda: len(harness.counted) == 1)
        for grant in (0, 1, 7):
            client.send(encode(TapPiece(fence, grant)), b"not requested")
        harness.snapshot()
        until(lambda: ranks.outboxes[0].free)
        ranks.outboxes[0].put(b"authentic")
        until(lambda: len(harness.counted) == 2)
        assert {counted[2] for counted in harness.counted} == {b"authentic"}
        refused = lambda: harness.hosted.coordinator.status().refused_messages["stale"]  # noqa: E731
        until(lambda: refused() == 4, what="the one of another connection, and the three of the rank's own")
        assert harness.hosted.coordinator.status().epochs == 1


def test_a_daemon_without_a_tap_reports_the_reason(host):
    hosted = host()
    with TappedRanks(hosted.port) as ranks:
        ranks.outboxes[0].put(b"x")
        until(lambda: ranks.outboxes[0].problem, what=ranks.state())
        assert "stream.source" in ranks.outboxes[0].problem
        assert not ranks.outboxes[0].free


def test_a_waiting_rank_triggers_an_urgent_snapshot(daemon):
    harness = daemon()
    with TappedRanks(harness.hosted.port) as ranks:
        ranks.outboxes[1].put(b"last")
        until(lambda: len(harness.counted) == 1)
        assert "tap_urgent" not in harness.hosted.names()
        waiter = threading.Thread(target=lambda: ranks.outboxes[1].wait_until_free(10.0, urgent=True))
        waiter.start()
        until(lambda: "tap_urgent" in harness.hosted.names())
        harness.snapshot()
        waiter.join(10)
        assert ranks.outboxes[1].free
