"""Scale models of a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexd.topology.files import load_preset, scale_model


def test_the_scale_model_changes_latencies_alone() -> None:
    cluster = load_preset("azure-a100-200g")
    scaled = scale_model(cluster, 100.0)
    for link, small in ((cluster.intra_node, scaled.intra_node), (cluster.inter_node, scaled.inter_node)):
        for name in ("all_to_all", "all_reduce", "all_gather"):
            curve, other = getattr(link, name), getattr(small, name)
            assert other.latency_seconds == pytest.approx(curve.latency_seconds / 100)
            assert replace(other, latency_seconds=curve.latency_seconds) == curve
    assert "scale model" in scaled.source
    assert cluster.source.rstrip(".") in scaled.source
