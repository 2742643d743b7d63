"""Missing offsets are fetched again, since a broker may show a message before one with a lower offset."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.stream.kafka.source import GAP_SECONDS, TRUSTED_GAPS, GroupPositions
from tests.support.clock import Clock

KEY = "t/0"


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
