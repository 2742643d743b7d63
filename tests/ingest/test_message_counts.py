"""Counts of messages: sums, differences, bounded reasons, documents."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexd.core.errors import StreamError
from flexd.ingest.message_counts import MAX_REASONS, MessageCounts
from flexd.sketch.types import AccessCounts

NUMBERS = st.integers(0, 2**40)
COUNTS = st.builds(
    MessageCounts,
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.builds(AccessCounts, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.dictionaries(st.sampled_from(["too_large", "empty", "bad_json"]), st.integers(1, 2**40)),
)
ONE = MessageCounts(3, 500, 2, AccessCounts(accepted=40, late=4), {"too_large": 1})


@given(COUNTS, COUNTS)
def test_sums_and_differences_are_by_field(a: MessageCounts, b: MessageCounts) -> None:
    total = a + b
    assert (total.messages, total.bytes, total.batches) == (
        a.messages + b.messages, a.bytes + b.bytes, a.batches + b.batches
    )  # fmt: skip
    assert total.accesses == a.accesses + b.accesses
    assert total.rejected == {
        reason: a.rejected.get(reason, 0) + b.rejected.get(reason, 0) for reason in {*a.rejected, *b.rejected}
    }
    assert total - b == a
    assert a - a == MessageCounts()


def test_reasons_beyond_the_limit_are_counted_together() -> None:
    total = MessageCounts()
    for i in range(2 * MAX_REASONS):
        total += MessageCounts(rejected={f"r{i}": 2})
    assert len(total.rejected) == MAX_REASONS + 1
    assert total.rejected["other"] == 2 * MAX_REASONS
    assert sum(total.rejected.values()) == 4 * MAX_REASONS


@given(COUNTS)
def test_a_document_restores_the_counts(counts: MessageCounts) -> None:
    assert MessageCounts.from_document(json.loads(json.dumps(counts.document()))) == counts


@pytest.mark.parametrize(
    "change",
    [
        {"messages": -1}, {"messages": 1.5}, {"bytes": True}, {"batches": 2**63}, {"accesses": []}, {"accesses": None},
        {"accesses": {**ONE.document()["accesses"], "late": "4"}}, {"rejected": []}, {"rejected": {"r" * 65: 1}},
        {"rejected": {f"r{i}": 1 for i in range(MAX_REASONS + 2)}},
    ],
)  # fmt: skip
def test_malformed_documents_are_refused(change: dict) -> None:
    assert MessageCounts.from_document(ONE.document()) == ONE
    with pytest.raises(StreamError, match="malformed counts"):
        MessageCounts.from_document({**ONE.document(), **change})
    with pytest.raises(StreamError):
        MessageCounts.from_document({key: value for key, value in ONE.document().items() if key not in change})
