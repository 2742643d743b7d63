"""Plans of the planner in the API."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flexd.api.plan import PlanReport
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import Placement, RankLayout, Tier
from flexd.planner.plan import PlanOrigin, make_plan
from flexd.sketch.profile import Profile, TableProfile
from flexd.topology.files import load_preset


@pytest.fixture(scope="module")
def plan():
    """A plan of the planner itself that promotes and demotes."""
    rows = 20_000
    share = np.arange(1, rows + 1) ** -1.2
    share /= share.sum()
    empty = np.zeros(0)
    table = TableProfile("items", rows, 1e7, 4e6, np.arange(rows), share, empty, empty, rows)
    return make_plan(
        Profile((table,), generation=3, samples=10**7),
        KeySpace([TableSpec("items", rows, 4096, "float32", "rowwise_adagrad")]),
        RankLayout(4, 4),
        load_preset("azure-a100-200g"),
        [1000],
        Placement.of(np.arange(19_990, 20_000), np.full(10, Tier.DEVICE, np.uint8)),
        PlanOrigin("p7", "p6", 2, "drift", 1.7e9),
        horizon_steps=10_000,
    )


def test_a_real_plan_goes_through_the_api_and_loses_nothing(plan):
    summary = plan.summary
    report = PlanReport.from_summary(summary, {"NODE": 0, "DEVICE": 10})
    assert PlanReport.model_validate_json(report.model_dump_json()) == report
    shown = report.model_dump(mode="json")

    def compare(path: str, planner: object, api: object) -> None:
        if isinstance(planner, dict):
            for key, value in planner.items():
                assert key in api, f"the API drops {path}.{key}"
                compare(f"{path}.{key}", value, api[key])
        else:
            assert json.loads(json.dumps(planner)) == api, path

    compare("plan", summary, shown)
