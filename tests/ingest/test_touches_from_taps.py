"""From the taps of four ranks to the planner: what they send predicts the bytes that ranks send."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import flexd
from flexd.core import tap_counts
from flexd.ingest.message_counter import _ingest
from flexd.sketch.profile import Profile
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.types import SketchSettings
from tests.support.bursty_steps import (
    ACCESSES,
    LAYOUT,
    TABLE,
    batches,
    planned,
    predicted_between_nodes,
    sent_between_nodes,
)
from tests.support.until import until

STEPS = 60


def counted_by_a_tap(passes: list[np.ndarray], touch_steps: int) -> tap_counts.TapCounts:
    """Return the message of a tap that has seen these look-ups."""
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable(TABLE.name, TABLE.rows, 1)])
    tap = flexd.Tap(
        collection, interval_seconds=1e9, interval_steps=len(passes), touch_steps=touch_steps, clock=lambda: 1e9
    )
    tap.start()
    for rows in passes:
        collection({TABLE.name: flexd.Jagged(torch.from_numpy(rows), torch.tensor([len(rows)]))})
        collection.optimizer.step()
    message = until(tap.outbox.current, 20)
    tap._stopping = True
    return tap_counts.decode(message.payload)


def profile_of(steps: list[list[np.ndarray]], touch_steps: int) -> Profile:
    sketches = SketchSet.of([TABLE], SketchSettings(half_life_seconds=None))
    sketches.profile(layout=LAYOUT)
    for rank in range(LAYOUT.world_size):
        message = counted_by_a_tap([ranks[rank] for ranks in steps], touch_steps)
        _ingest(sketches, replace(message, source_rank=rank), 1e9, "")
    sketches._touches[0].flush(sketches._decay)
    return sketches.profile(ACCESSES * LAYOUT.world_size, layout=LAYOUT)


def test_a_plan_from_taps_predicts_the_bytes_between_nodes():
    steps = batches(STEPS)
    profile = profile_of(steps, touch_steps=1)
    target = planned(profile)
    sent = sent_between_nodes(steps, target)
    assert predicted_between_nodes(profile, target) == pytest.approx(sent, rel=0.01)
    without = profile_of(steps, touch_steps=0)
    assert without.tables[0].touches is None
    assert predicted_between_nodes(without, target) > 1.2 * sent
