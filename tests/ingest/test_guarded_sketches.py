"""A sketch set behind a lock: reading while another thread writes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

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


def test_readers_wait_while_a_message_is_counted():
    guarded = GuardedSketches(_counted(1))

    def freeze() -> None:
        with guarded.frozen():
            pass

    reads = (
        freeze,
        lambda: guarded.query("small", ROW, 0.0),
        lambda: guarded.profile(None, 1, 0, None, 0.0),
        lambda: guarded.table_profile("small", None, 0.0),
        lambda: guarded.sequence_length_quantiles("small", [0.5]),
    )
    with guarded.lock:
        readers = [_in_thread(read) for read in reads]
        assert not any(done.wait(0.1) for _, done in readers)
    assert all(done.wait(DEADLINE) for _, done in readers)
    for thread, _ in readers:
        thread.join(DEADLINE)


def test_reads_are_as_of_the_idle_time():
    guarded = GuardedSketches(_counted(8))
    half_life = SETTINGS.half_life_seconds
    assert guarded.query("small", ROW, half_life)[0] == pytest.approx(4, rel=1e-4)
    assert guarded.table_profile("small", None, 2 * half_life).weight == pytest.approx(2, rel=1e-4)
    assert guarded.profile(None, 7, 0, None, half_life).tables[0].weight == pytest.approx(4, rel=1e-4)
    assert guarded.newest_event_seconds == T0
    assert np.isnan(GuardedSketches(SketchSet.of(TABLES, SETTINGS)).newest_event_seconds)
