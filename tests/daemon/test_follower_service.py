"""The status, the metrics page and the refusals of a follower."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexd.config.load import parse_config
from flexd.core.errors import ApiError
from flexd.daemon.follower_service import FollowerDaemon
from flexd.server.metrics import Metrics
from flexd.stream.offsets_in_work import RECORD_FORMAT, RECORD_NAME


@pytest.fixture
def follower(tmp_path: Path) -> FollowerDaemon:
    return make_follower(tmp_path)


def make_follower(tmp_path: Path) -> FollowerDaemon:
    return FollowerDaemon(
        parse_config(
            {
                "job": "j",
                "tables": [{"name": "item", "rows": 300, "dim": 4}],
                "stream": {"source": {"kind": "synthetic", "accesses_per_second": 1}},
                "scale_out": {"role": "follower", "leader": "127.0.0.1:1"},
                "server": {"port": 0},
                "state": {"dir": str(tmp_path)},
            }
        )
    )


def test_the_status_has_the_stream_the_counters_and_the_link(follower: FollowerDaemon) -> None:
    status = follower.status()
    assert (status.job, status.stream.source, status.healthy) == ("j", "synthetic", False)
    assert [table.table for table in status.sketch.tables] == ["item"]
    assert status.scale_out is not None
    assert status.scale_out.link is not None
    assert (status.scale_out.role, status.scale_out.link.leader) == ("follower", "127.0.0.1:1")


def test_the_metrics_page_has_the_link_and_no_ranks(follower: FollowerDaemon) -> None:
    page = Metrics(follower).render()[0].decode()
    assert 'flexd_scale_out_push_failures_total{reason="unreachable"} 0.0' in page
    assert 'flexd_sketch_bytes{table="item"}' in page
    assert "flexd_rank_step_seconds{" not in page


def test_commands_are_refused_with_the_leaders_address(follower: FollowerDaemon) -> None:
    with pytest.raises(ApiError, match="plans and moves nothing") as refused:
        follower.pause("why")
    assert (refused.value.status, "127.0.0.1:1" in refused.value.remedy) == (409, True)


def test_a_record_of_offsets_of_a_newer_flexd_is_kept_aside(tmp_path: Path) -> None:
    """A follower has no other state, so it starts."""
    newer = json.dumps({"format": RECORD_FORMAT + 1, "offsets": []})
    (tmp_path / RECORD_NAME).write_text(newer)
    assert make_follower(tmp_path).status().job == "j"
    assert (tmp_path / f"{RECORD_NAME}.newer").read_text() == newer
