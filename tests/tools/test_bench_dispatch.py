"""What a step launches and waits for does not grow with the job; counted on simulated ranks."""

from __future__ import annotations

import pytest

from flexd.core.layout import RankLayout
from tools.bench.sections.dispatch import Case, measure


@pytest.mark.parametrize("exchange", ["chain", "direct"])
def test_launches_and_waits_grow_with_neither_tables_nor_features_nor_peers(exchange: str) -> None:
    """Four dim-groups in every case. Copies are listed, so replicas are synchronised too."""
    counts = []
    for layout, tables in ((RankLayout(4, 4), 8), (RankLayout(4, 4), 32), (RankLayout(32, 8), 32)):
        figures = measure(Case("", layout, tables, 64, 0.02, exchange=exchange), 1)
        counts.append({name: figures[name] for name in ("launches", "host waits", "uploads", "collectives")})
    few, *others = counts
    assert all(each["host waits"] <= 10 and each["uploads"] <= 14 for each in counts)
    assert all(each["launches"] <= (400 if exchange == "chain" else 320) for each in counts)
    for other in others:
        # Where all keys are distinct, or a column has no rows, a step waits once less or launches a few kernels less.
        assert abs(other["launches"] - few["launches"]) <= 0.1 * few["launches"]
        assert abs(other["host waits"] - few["host waits"]) <= 1
        # A message of more than 128 parts is packed by an index, made of one upload.
        assert abs(other["uploads"] - few["uploads"]) <= 5
        assert other["collectives"] == few["collectives"]


def test_pooling_adds_less_than_a_launch_to_each_dim_group() -> None:
    """Four dim-groups. Pooling takes the place of expanding the rows; offsets of all groups are made together."""
    figures = [measure(Case("", RankLayout(4, 4), 8, 64, 0.02, pooled=pooled), 1) for pooled in (False, True)]
    rows, bags = figures
    assert bags["launches"] <= rows["launches"] + 3
    assert bags["uploads"] <= rows["uploads"] + 1


def test_sums_of_bags_grow_with_neither_tables_nor_peers() -> None:
    """Four dim-groups; half of the tables answer by sums, and rows of all have copies. Sums add four collectives a hop
    and a wait for their sizes."""
    cases = [(RankLayout(4, 4), 8, 0.5), (RankLayout(4, 4), 32, 0.5), (RankLayout(32, 8), 32, 0.5)]
    few, *others = (
        measure(Case("", layout, tables, 64, 0.02, pooled=True, sums=sums), 1) for layout, tables, sums in cases
    )
    rows = measure(Case("", RankLayout(4, 4), 8, 64, 0.02, pooled=True), 1)
    assert few["collectives"] == rows["collectives"] + 8
    assert few["host waits"] <= rows["host waits"] + 3
    assert few["launches"] <= rows["launches"] + 150
    for other in others:
        assert abs(other["launches"] - few["launches"]) <= 0.1 * few["launches"]
        assert abs(other["host waits"] - few["host waits"]) <= 1
        assert abs(other["uploads"] - few["uploads"]) <= 7
        assert other["collectives"] == few["collectives"]
