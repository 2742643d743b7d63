"""Counters of sent bytes."""

from __future__ import annotations

import pytest

from flexd.embedding.exchange.collectives import Traffic, TrafficKind


def test_bytes_are_of_the_kind_they_were_sent_for() -> None:
    traffic = Traffic()
    traffic.sent(1, 2)
    with traffic.kind(TrafficKind.SYNC):
        traffic.sent(3, 4)
        with traffic.kind(TrafficKind.MIGRATION):
            traffic.sent(5, 6)
        traffic.sent(10, 20)
        with traffic.uncounted():
            traffic.sent(100, 100)
    with pytest.raises(ZeroDivisionError), traffic.kind(TrafficKind.MIGRATION):
        _ = 1 / 0
    traffic.sent(1, 1)
    totals = traffic.totals()
    assert (totals["all_to_all_intra_bytes"], totals["all_to_all_inter_bytes"]) == (2, 3)
    assert (totals["sync_intra_bytes"], totals["sync_inter_bytes"]) == (13, 24)
    assert (totals["migration_intra_bytes"], totals["migration_inter_bytes"]) == (5, 6)
