"""Counters begin at 0 for everything they can say, so that ``rate()`` sees the first of it."""

from __future__ import annotations

import gen_metrics_docs
from prometheus_client.parser import text_string_to_metric_families

from flexd.config.load import parse_config
from flexd.daemon import Daemon
from flexd.server.app import Metrics

OF_HTTP = "flexd_api"
GAUGES = ("flexd_plan_gate_open", "flexd_placement_rows")


def test_a_fresh_daemon_shows_every_documented_value_at_zero(tmp_path):
    config = parse_config(
        {
            "job": "j",
            "tables": [{"name": "item", "rows": 300, "dim": 4}],
            "stream": {"source": {"kind": "tap"}},
            "control": {"listen_port": 0},
            "server": {"port": 0},
            "state": {"dir": str(tmp_path / "state")},
        }
    )
    daemon = Daemon(config)
    daemon.start()
    try:
        page, _ = Metrics(daemon).render()
    finally:
        assert daemon.stop(20.0)
    shown = {
        (family.name, name, value): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        for name, value in sample.labels.items()
    }
    expected = {
        (family, label, value): 0
        for (family, label), values in gen_metrics_docs.KNOWN_VALUES.items()
        if family not in GAUGES and not family.startswith(OF_HTTP)
        for value in values
    }
    assert len(expected) > 50
    assert {key: shown.get(key) for key in expected} == expected
