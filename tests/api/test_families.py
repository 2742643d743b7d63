"""Counters begin at 0 for everything they can say, so that ``rate()`` sees the first of it."""

from __future__ import annotations

import gen_metrics_docs
from prometheus_client.parser import text_string_to_metric_families

from flexd.api.families import with_zeros
from flexd.api.scale_out import follower_status
from flexd.api.stream import stream_status
from flexd.config.load import parse_config
from flexd.config.planner import PlannerConfig
from flexd.core.supervision import Supervisor
from flexd.daemon import Daemon
from flexd.daemon.scale_out import remote_follower
from flexd.ingest.stats import IngestStats
from flexd.operations.gates import GATE_NAMES, SAVING, evaluate_gates
from flexd.scaleout.delta_sender import FAILURE_REASONS
from flexd.scaleout.follower import Follower, FollowerStats
from flexd.server.metrics import Metrics
from flexd.sketch.profile import Profile

WITHOUT_LEADER = ("flexd_scale_out", "flexd_api")
"""Families of followers, and of the HTTP side."""
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
        if family not in GAUGES and not family.startswith(WITHOUT_LEADER)
        for value in values
    }
    assert len(expected) > 50
    assert {key: shown.get(key) for key in expected} == expected


def test_what_has_come_up_is_kept_whether_it_was_expected_or_not():
    assert with_zeros(("a", "b"), {"b": 2, "z": 1}) == {"a": 0, "b": 2, "z": 1}
    tables = [{"name": "item", "rows": 3, "dim": 4}]
    config = parse_config({"job": "j", "tables": tables, "stream": {"source": {"kind": "tap"}}})
    stats = IngestStats(rejected_messages={"corrupt": 3, "other": 1})
    counted = stream_status(config, stats).rejected_messages
    assert (counted["corrupt"], counted["other"], counted["empty"]) == (3, 1, 0)


def test_the_gates_are_those_that_are_named():
    assert (
        *(gate.name for gate in evaluate_gates(Profile((), generation=1, samples=0), PlannerConfig())),
        SAVING,
    ) == GATE_NAMES


def test_a_follower_shows_every_reason_of_a_failed_push(tmp_path, monkeypatch):
    config = parse_config(
        {
            "job": "j",
            "tables": [{"name": "item", "rows": 300, "dim": 4}],
            "stream": {"source": {"kind": "synthetic", "accesses_per_second": 1}},
            "scale_out": {"role": "follower", "leader": "127.0.0.1:1"},
            "state": {"dir": str(tmp_path)},
        }
    )
    monkeypatch.setattr(Follower, "stats", lambda _: FollowerStats(failures={"unreachable": 2}))
    link = follower_status("127.0.0.1:1", remote_follower(config, Supervisor()).stats()).link
    assert link is not None
    assert link.failures == {**dict.fromkeys(FAILURE_REASONS, 0), "unreachable": 2}
