"""Mistakes that ranks report are counted once, whatever is sent again."""

from __future__ import annotations

from flexd.core.mistakes import MAX_TEXT, MistakeKind, MistakeLog, MistakeReport
from flexd.operations.mistake_totals import OTHER, MistakeTotals


def test_a_log_counts_by_kind_keeps_the_newest_text_and_tells_its_listeners() -> None:
    times = iter([10.0, 20.0, 30.0])
    log, told = MistakeLog(lambda: next(times)), []
    listener = lambda: told.append(len(log.reports()))  # noqa: E731
    log.add_listener(listener)
    log.note(MistakeKind.LONE_SAVE, "first")
    log.note(MistakeKind.LONE_SAVE, "x" * 1000)
    log.note(MistakeKind.NUMPY, "old")
    log.remove_listener(listener)
    log.note(MistakeKind.NUMPY, "again")
    assert told == [1, 1, 2]
    saves, numpy = log.reports()
    assert saves == MistakeReport("lone_save", 2, "x" * MAX_TEXT, 10.0)
    assert (numpy.kind, numpy.count, numpy.text) == ("numpy", 2, "again")


def test_a_repeated_report_counts_once_and_a_new_process_counts_anew() -> None:
    clock = iter(range(100, 200))
    totals = MistakeTotals(lambda: float(next(clock)))
    first = MistakeReport("changed_ids", 2, "a", 10.0)
    totals.add(0, [first])
    totals.add(0, [first])
    totals.add(0, [MistakeReport("changed_ids", 5, "b", 10.0)])
    totals.add(1, [MistakeReport("changed_ids", 1, "c", 11.0)])
    totals.add(0, [MistakeReport("changed_ids", 1, "d", 50.0)])  # it began again
    totals.add(0, [MistakeReport("of a newer flexd", 3, "e", 50.0)])
    newest, copied = totals.totals()
    assert (newest.kind, newest.count) == (OTHER, 3)
    assert (copied.count, copied.rank, copied.text) == (5 + 1 + 1, 0, "d")
