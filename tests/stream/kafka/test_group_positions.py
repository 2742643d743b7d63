"""Missing offsets are fetched again, since a broker may show a message before one with a lower offset."""

from __future__ import annotations

import time
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka import KafkaConsumer
from tansu_broker import TansuBroker

from flexd.stream.kafka.group_positions import GAP_SECONDS, TRUSTED_GAPS, GroupPositions
from flexd.stream.kafka.sink import KafkaSink
from flexd.stream.kafka.source import KafkaSource
from tests.support.reading import poll_until

KEY = "t/0"
COUNT = 30


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@given(
    hidden=st.dictionaries(st.integers(0, 39), st.floats(0.0, 0.9 * GAP_SECONDS), max_size=12),
    missing=st.sets(st.integers(1, 39), max_size=TRUSTED_GAPS - 1),
    fetch=st.integers(1, 40),
    start=st.sampled_from([None, 0]),
)
@settings(max_examples=200, deadline=None)
def test_every_message_is_delivered_once_and_in_order(
    hidden: dict[int, float], missing: set[int], fetch: int, start: int | None
) -> None:
    """``hidden``: seconds after which an offset becomes visible; ``missing``: offsets that hold no message."""
    clock = Clock()
    positions = GroupPositions("t", "earliest", clock)
    if start is not None:
        positions.restore({KEY: start})
    else:
        # Without a position the first message that arrives is the beginning.
        hidden = {offset: seconds for offset, seconds in hidden.items() if offset > 0}
    log = [offset for offset in range(40) if offset not in missing]
    got: list[int] = []
    while (positions.get(KEY) or 0) <= log[-1]:
        since = clock.now - 100.0
        seen = [offset for offset in log if offset >= (positions.get(KEY) or 0) and hidden.get(offset, 0.0) <= since]
        offsets = seen[:fetch]
        taken = positions.count_to_gap(KEY, offsets) if offsets else 0
        if taken:
            positions.accept(KEY, offsets[0], offsets[taken - 1])
            got += offsets[:taken]
        clock.now += 0.01
        assert clock.now < 100 + 0.3 * 40
    assert got == log


def test_gaps_of_a_partition_that_has_many_cause_no_waiting() -> None:
    clock = Clock()
    positions = GroupPositions("t", "earliest", clock)
    positions.restore({KEY: 0})
    for number in range(TRUSTED_GAPS):
        assert positions.count_to_gap(KEY, [10 * number + 5]) == 0
        clock.now += GAP_SECONDS + 0.01
        assert positions.count_to_gap(KEY, [10 * number + 5]) == 1
        positions.accept(KEY, 10 * number + 5, 10 * number + 5)
    assert positions.count_to_gap(KEY, [200, 210, 220]) == 3
    assert positions.count_to_gap("t/1", [5, 7]) == 1, "another partition may have no gaps"
    assert positions.gaps_filled == 0


class Late:
    """Hide one offset for a while, like a broker that shows the next one first."""

    def __init__(self, offset: int, seconds: float) -> None:
        self._offset, self._seconds = offset, seconds
        self._since: float | None = None
        self.hidden = 0

    def shows(self, offset: int) -> bool:
        if offset > self._offset and self._since is None:
            self._since = time.monotonic()
        hides = offset == self._offset and (self._since is None or time.monotonic() < self._since + self._seconds)
        self.hidden += hides
        return not hides


@pytest.fixture
def broker() -> Any:
    with TansuBroker(topics={"t": 1}) as broker:
        sink = KafkaSink(broker.bootstrap_servers, "t")
        for i in range(COUNT):
            sink.send(b"%d" % i)
        sink.flush(20.0)
        sink.close()
        yield broker


def read(source: KafkaSource) -> list[int]:
    messages = poll_until(source, lambda messages: messages and messages[-1].offset >= COUNT - 1, 40)
    source.close()
    return [message.offset for message in messages]


def group() -> str:
    return f"group-{uuid.uuid4().hex[:8]}"


@pytest.mark.parametrize("offset", [0, 7, COUNT - 2])
def test_a_message_that_appears_late_is_read(broker: TansuBroker, monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    late = Late(offset, 0.1)
    poll = KafkaConsumer.poll

    def hiding(consumer: KafkaConsumer, *arguments: Any, **options: Any) -> Any:
        got = poll(consumer, *arguments, **options)
        shown = {part: [each for each in records if late.shows(each.offset)] for part, records in got.items()}
        return {part: records for part, records in shown.items() if records}

    monkeypatch.setattr(KafkaConsumer, "poll", hiding)
    source = KafkaSource(broker.bootstrap_servers, "t", group(), session_timeout_seconds=2.0)
    source.restore({KEY: 0})
    assert read(source) == list(range(COUNT))
    assert late.hidden > 0
    assert source._positions.gaps_filled == 1
