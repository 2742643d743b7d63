"""Deltas are sent again until an answer is final."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flexd.core.errors import ScaleOutError
from flexd.core.keyspace import TableSpec
from flexd.scaleout.delta_sender import DeltaSender
from flexd.scaleout.push_answer import PushAnswer
from tests.support.until import until

ACCEPTED = PushAnswer("accepted", {"p": 4})


class ScriptedLink:
    """Answers in the given order; an exception is raised."""

    def __init__(self) -> None:
        self.script: list[PushAnswer | Exception] = []
        self.received: list[bytes] = []
        self.closed = False

    def offer(self, data: bytes) -> PushAnswer:
        self.received.append(data)
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def link() -> ScriptedLink:
    return ScriptedLink()


@pytest.fixture
def sender(link: ScriptedLink) -> Iterator[DeltaSender]:
    made = DeltaSender(link)
    made.start()
    yield made
    assert made.stop(20.0)
    assert link.closed


def test_a_delta_is_encoded_once_and_repeated_until_it_is_accepted(sender: DeltaSender, link: ScriptedLink) -> None:
    encoded: list[int] = []
    link.script = [
        ScaleOutError("down", reason="unreachable"),
        PushAnswer("refused", {}, reason="of another release", message="no"),
        RuntimeError("broken"),
        ACCEPTED,
    ]

    def make() -> bytes:
        encoded.append(1)
        return b"delta"

    sender.send(make)

    def answer() -> PushAnswer | None:
        sender.retry_now()
        return sender.poll_answer(0.01)

    assert until(answer, 20.0) == ACCEPTED
    assert (len(encoded), link.received) == (1, [b"delta"] * 4)
    assert sender.failures == {"unreachable": 1, "other": 1, "internal_error": 1}
    assert (sender.attempts, sender.bytes_sent, sender.problem) == (4, 20, None)
    assert sender.poll_answer() is None, "an answer is returned once"
    assert sender.refusal is None


def test_a_refused_position_is_a_final_answer(sender: DeltaSender, link: ScriptedLink) -> None:
    refusal = PushAnswer("refused", {"p": 9}, reason="position")
    link.script = [refusal]
    sender.send(lambda: b"delta")
    assert sender.poll_answer(20.0) == refusal
    assert sender.failures == {}


def test_the_newest_refusal_is_kept_until_an_answer_is_final(sender: DeltaSender, link: ScriptedLink) -> None:
    refusal = PushAnswer("refused", {}, reason="other_tables", tables=(TableSpec("item", 9, 4),))
    link.script = [refusal] + 50 * [ScaleOutError("down", reason="unreachable")]
    sender.send(lambda: b"delta")
    until(lambda: sender.problem == "down", 20.0)
    assert sender.refusal == refusal
    link.script = [ACCEPTED]
    sender.retry_now()
    assert sender.poll_answer(20.0) == ACCEPTED
    assert sender.refusal is None


def test_a_second_delta_is_refused_until_the_first_is_settled(sender: DeltaSender, link: ScriptedLink) -> None:
    link.script = [ACCEPTED, ACCEPTED]
    sender.send(lambda: b"one")
    with pytest.raises(ScaleOutError, match="in flight already"):
        sender.send(lambda: b"two")
    assert sender.poll_answer(20.0) == ACCEPTED
    sender.send(lambda: b"two")
    assert sender.poll_answer(20.0) == ACCEPTED
    assert link.received == [b"one", b"two"]


def test_a_stop_drops_a_delta_that_gets_no_answer(link: ScriptedLink) -> None:
    sender = DeltaSender(link)
    link.script = [ScaleOutError("down", reason="unreachable")]
    sender.start()
    sender.send(lambda: b"delta")
    until(lambda: sender.problem == "down", 20.0)
    assert sender.stop(20.0)
    assert link.received == [b"delta"]
