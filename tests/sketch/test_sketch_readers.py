"""Reading a sketch set while another thread writes, and as of a later time."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from flexd.sketch.sketch_set import SketchSet
from tests.support.ingest_fakes import DEADLINE, SETTINGS, T0, TABLES

ROW = np.array([3])


def _counted(accesses: int) -> SketchSet:
    sketches = SketchSet(TABLES, SETTINGS)
    sketches.ingest("small", np.repeat(ROW, accesses), 0, T0)
    return sketches


def _in_thread(action) -> tuple[threading.Thread, threading.Event]:
    done = threading.Event()
    thread = threading.Thread(target=lambda: (action(), done.set()), daemon=True)
    thread.start()
    return thread, done


def test_readers_wait_while_a_message_is_counted():
    sketches = _counted(1)
    reads = (
        lambda: sketches.query("small", ROW),
        sketches.profile,
        lambda: sketches.table_profile("small"),
    )
    with sketches.lock:
        readers = [_in_thread(read) for read in reads]
        assert not any(done.wait(0.1) for _, done in readers)
    assert all(done.wait(DEADLINE) for _, done in readers)
    for thread, _ in readers:
        thread.join(DEADLINE)


def test_reads_are_as_of_the_idle_time():
    sketches = _counted(8)
    half_life = SETTINGS.half_life_seconds
    assert sketches.query("small", ROW, half_life)[0] == pytest.approx(4, rel=1e-4)
    assert sketches.table_profile("small", None, 2 * half_life).weight == pytest.approx(2, rel=1e-4)
    assert sketches.profile(None, 7, 0, None, half_life).tables[0].weight == pytest.approx(4, rel=1e-4)
    assert sketches.newest_event_seconds == T0
    assert np.isnan(SketchSet(TABLES, SETTINGS).newest_event_seconds)
