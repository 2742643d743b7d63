"""Changes of answers: composed, taken back, cut into chunks and as text; what a trainer cannot do is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexd.core.answers import NO_ANSWERS, AnswerChange, TableAnswers
from flexd.core.errors import PlacementError
from flexd.core.placement import Delta, Placement

TABLES = 6
some = st.frozensets(st.integers(0, TABLES - 1))


@given(first=some, flips=st.lists(some, max_size=6), rows_per_chunk=st.integers(1, 4))
def test_any_changes_lead_from_the_first_answers_to_those_of_a_placement_and_back(
    first: frozenset[int], flips: list[frozenset[int]], rows_per_chunk: int
) -> None:
    begun = now = TableAnswers(frozenset(range(TABLES)), first)
    placement, digest = Placement.empty(), 0
    for flipped in flips:
        change = AnswerChange.of(flipped & now.by_sums, flipped - now.by_sums)
        assert AnswerChange.of_text(change.to_text()) == change
        for part in Delta.of_answers(change).chunks(rows_per_chunk):
            assert 0 < len(part) <= rows_per_chunk
            assert part.answers is not None
            now, placement = now.after(part.answers), placement.apply(part)
            digest = (digest + part.digest_change()) % 2**64
        assert placement.digest() == digest
        assert placement.answers == begun.change_to(now)
    assert (digest == 0) == (now == begun)
    back = placement.answers.change_to(NO_ANSWERS)
    assert now.after(back) == begun
    assert placement.apply(Delta.of_answers(back)).digest() == 0
    for table in range(TABLES):
        changed = (table in now.by_sums) != (table in first)
        assert placement.answers.answer_of(table) == (["rows", "sums"][table in now.by_sums] if changed else None)


@given(one=some, other=some, first=some)
def test_a_change_leads_from_any_answers_to_any_others(
    one: frozenset[int], other: frozenset[int], first: frozenset[int]
) -> None:
    begun = TableAnswers(frozenset(range(TABLES)), first)
    now, then = (begun.change_to(TableAnswers(begun.pooled, sums)) for sums in (one, other))
    assert now.then(now.change_to(then)) == then


@pytest.mark.parametrize(
    "text", ["[]", "[[0],[0]]", "[[1,0],[]]", "[[-1],[]]", '[["0"],[]]', "[[true],[]]", "[0,1]", "{}", "[[],", "x"]
)
def test_texts_that_are_no_change_are_refused(text: str) -> None:
    with pytest.raises(PlacementError):
        AnswerChange.of_text(text)


def test_changes_from_other_answers_are_refused_by_name() -> None:
    now = TableAnswers(frozenset({0, 1, 3}), frozenset({1}))
    names = ["item", "shop", "plain", "copied"]
    for change, text in (
        (AnswerChange((0,)), "'item' answers by rows already"),
        (AnswerChange((), (1,)), "'shop' answers by sums already"),
        (AnswerChange((), (2,)), "'plain' cannot change its answer"),
        (AnswerChange((), (3,)), "'copied' cannot answer by sums"),
        (AnswerChange((), (8,)), "table 8 cannot change its answer"),
    ):
        with pytest.raises(PlacementError, match=text):
            now.after(change, names, {3})
    with pytest.raises(PlacementError, match="table 1 answers by sums already"):
        AnswerChange((), (1,)).then(AnswerChange((), (1,)))
