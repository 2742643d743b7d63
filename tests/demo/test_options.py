"""Options that are accepted and refused."""

from __future__ import annotations

import pytest

from flexd.core.errors import ConfigError
from flexd.demo.options import DemoOptions


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"nodes": 0}, "--nodes 0"),
        ({"nodes": 17}, "--nodes 17"),
        ({"local_ranks": 0}, "--local-ranks 0"),
        ({"steps": 19}, "--steps 19"),
        ({"batch_size": 1}, "--batch-size 1"),
        ({"micro_batches": 0}, "--micro-batches 0"),
        ({"link_mbit": -1.0}, "--link-mbit -1.0"),
        ({"link_mbit": float("inf")}, "--link-mbit inf"),
        ({"replica_budget": -0.1}, "--replica-budget -0.1"),
        ({"replica_budget": 1.1}, "--replica-budget 1.1"),
        ({"replica_budget": float("nan")}, "--replica-budget nan"),
        ({"dtype": "float16"}, "--dtype float16"),
    ],
)
def test_options_that_no_run_can_have(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        DemoOptions(**options)  # type: ignore[arg-type]
    assert error.value.message.startswith(named)
    assert error.value.remedy
