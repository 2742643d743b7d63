"""A sketch set behind a lock: merging, draining and reading while another thread writes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from flexd.core.errors import SketchError
from flexd.ingest.guarded_sketches import GuardedSketches
from flexd.sketch.sketch_set import SketchSet
from tests.support.ingest_fakes import DEADLINE, SETTINGS, T0, TABLES

ROW = np.array([3])


def _counted(accesses: int) -> SketchSet:
    sketches = SketchSet.of(TABLES, SETTINGS)
    sketches.ingest("small", np.repeat(ROW, accesses), 0, T0)
    return sketches


def _in_thread(action) -> tuple[threading.Thread, threading.Event]:
    done = threading.Event()
    thread = threading.Thread(target=lambda: (action(), done.set()), daemon=True)
    thread.start()
    return thread, done


def test_merge_and_drain_wait_while_a_message_is_counted():
    for action in (lambda g: g.merge(_counted(2), lambda: None), lambda g: g.drain(None)):
        guarded = GuardedSketches(_counted(1))
        with guarded.lock:
            before = guarded.sketches
            thread, done = _in_thread(lambda action=action, guarded=guarded: action(guarded))
            assert not done.wait(0.2)
            assert guarded.sketches is before
            assert before.samples == 1
        assert done.wait(DEADLINE)
        thread.join(DEADLINE)


def test_no_reader_sees_a_merge_before_its_commit():
    guarded = GuardedSketches(_counted(1))
    merging, finish = threading.Event(), threading.Event()

    def commit() -> None:
        merging.set()
        finish.wait(DEADLINE)

    merger, merged = _in_thread(lambda: guarded.merge(_counted(2), commit))
    assert merging.wait(DEADLINE)

    def freeze() -> None:
        with guarded.frozen():
            pass

    readers = [
        _in_thread(lambda read=read: read())
        for read in (
            freeze,
            lambda: guarded.query("small", ROW, 0.0),
            lambda: guarded.profile(None, 1, 0, None, 0.0),
            lambda: guarded.table_profile("small", None, 0.0),
            lambda: guarded.sequence_length_quantiles("small", [0.5]),
            guarded.clock,
        )
    ]
    assert not any(done.wait(0.1) for _, done in readers)
    finish.set()
    assert merged.wait(DEADLINE)
    assert all(done.wait(DEADLINE) for _, done in readers)
    assert guarded.query("small", ROW, 0.0)[0] == pytest.approx(3)
    for thread in (merger, *(thread for thread, _ in readers)):
        thread.join(DEADLINE)


def test_sketches_of_other_settings_are_refused_whole():
    guarded = GuardedSketches(_counted(1))
    committed = []
    with pytest.raises(SketchError):
        guarded.merge(SketchSet(TABLES, 2**24), lambda: committed.append(1))
    assert not committed
    assert guarded.damage is None
    assert guarded.sketches.samples == 1


def test_an_interrupted_merge_is_remembered(monkeypatch):
    guarded = GuardedSketches(_counted(1))
    with pytest.raises(ZeroDivisionError):
        guarded.merge(_counted(2), lambda: 1 / 0)
    assert isinstance(guarded.damage, ZeroDivisionError)


def test_drain_returns_everything_and_continues_the_clock():
    guarded = GuardedSketches(_counted(5))
    drained = guarded.drain(None)
    assert drained.samples == 5
    assert guarded.sketches.samples == 0
    assert guarded.newest_event_seconds == T0
    later = SketchSet.of(TABLES, SETTINGS)
    later.ingest("small", ROW, 0, T0 + 50)
    guarded.drain(later.clock())
    assert guarded.newest_event_seconds == T0 + 50
    with pytest.raises(SketchError, match="malformed clock"):
        guarded.drain({"newest": "x"})
    guarded.sketches.merge(drained)
    assert guarded.query("small", ROW, 0.0)[0] == pytest.approx(5 / 2 ** (50 / SETTINGS.half_life_seconds), rel=1e-3)


def test_reads_are_as_of_the_idle_time():
    guarded = GuardedSketches(_counted(8))
    half_life = SETTINGS.half_life_seconds
    assert guarded.query("small", ROW, half_life)[0] == pytest.approx(4, rel=1e-4)
    assert guarded.table_profile("small", None, 2 * half_life).weight == pytest.approx(2, rel=1e-4)
    assert guarded.profile(None, 7, 0, None, half_life).tables[0].weight == pytest.approx(4, rel=1e-4)
    assert guarded.newest_event_seconds == T0
    assert np.isnan(GuardedSketches(SketchSet.of(TABLES, SETTINGS)).newest_event_seconds)
