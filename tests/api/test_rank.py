"""The ranks of a daemon."""

from __future__ import annotations

import pytest

from flexd.operations.training_monitor import TrainingMonitor
from tests.support.components import components, report


def test_ranks_behind_and_the_busiest_rank():
    training = TrainingMonitor()
    for rank, inter in ((0, 3000), (1, 1000)):
        training.add(rank, report(9, inter=inter))
    page = components(training=training).ranks(0, 3)
    assert (page.total, len(page.ranks), page.ready, page.problem) == (4, 3, False, "settling")
    first, second, silent = page.ranks
    assert (first.step, first.placement_version, first.behind, first.step_seconds) == (9, 5, 1, 0.5)
    assert first.replica_share == pytest.approx(0.5)
    assert first.inter_node_bytes_per_step == 3006
    assert (second.node, second.local_rank, silent.node, silent.step) == (0, 1, 1, None)
    assert page.imbalance == pytest.approx(3020 / ((3020 + 1020) / 2))
    none = components(ranks=False).ranks(0, 3)
    assert (none.total, none.problem) == (0, "no rank is registered")
