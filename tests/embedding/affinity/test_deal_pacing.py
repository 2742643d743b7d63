"""Pauses of dealing where it does not pay."""

from __future__ import annotations

from flexd.embedding.affinity.deal_pacing import DealPacing, DealtTotals


def run(saves: list[bool], pacing: DealPacing) -> list[int]:
    """Return the batches that are dealt."""
    totals, dealt = DealtTotals(), []
    for batch, pays in enumerate(saves):
        deals = pacing.deals(totals)
        totals.batches += 1
        if not deals:
            continue
        dealt.append(batch)
        totals.dealt_batches += 1
        totals.row_bytes_before += 100
        totals.row_bytes_after += 80 if pays else 98
        totals.id_bytes += 1
        pacing.judge(totals)
    return dealt


def test_dealing_that_pays_goes_on() -> None:
    assert run([True] * 50, DealPacing(trial=4, first_pause=10)) == list(range(50))


def test_dealing_that_does_not_pay_pauses_ever_longer_and_is_tried_again() -> None:
    dealt = run([False] * 100, DealPacing(trial=2, first_pause=10, longest_pause=25))
    assert dealt == [0, 1, 12, 13, 34, 35, 61, 62, 88, 89]


def test_dealing_goes_on_when_it_begins_to_pay() -> None:
    dealt = run([False] * 10 + [True] * 30, DealPacing(trial=2, first_pause=10))
    assert dealt == [0, 1, *range(12, 40)]


def test_a_trial_ends_when_it_has_cost_more_than_it_saved() -> None:
    totals, pacing = DealtTotals(), DealPacing(trial=4, first_pause=10)
    totals.batches = totals.dealt_batches = 1
    totals.row_bytes_before = totals.row_bytes_after = 100
    pacing.judge(totals)
    assert not pacing.deals(totals)
    totals.batches = 11
    assert pacing.deals(totals)
