"""Writes docs/metrics.md from the models of flexd.api; ``--check`` reports whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from generated import write_or_check
from prometheus_client.core import Metric

from flexd.api.planning import by_metric_tier
from flexd.api.rank import RankPage
from flexd.api.status import DaemonStatus
from flexd.api.stream import StreamStatus
from flexd.api.training import IdsStatus, SlowMemoryStatus
from flexd.control.daemon.epoch import REFUSED_KINDS
from flexd.control.daemon.migration import FINAL_STATES
from flexd.control.daemon.pusher import ThrottleReason
from flexd.core.model import MAX_LABEL_VALUES
from flexd.operations.executions import TriggerKind
from flexd.operations.planning import GATE_NAMES, PLAN_OUTCOMES
from flexd.operations.training_monitor import LINKS, TRAFFIC_KINDS
from flexd.server.access import REFUSED_REASONS
from flexd.server.app import REFUSED
from flexd.sketch.ingestor import MESSAGE_REASONS, ROW_REASONS

TARGET = Path(__file__).parents[1] / "docs" / "metrics.md"
COMMAND = "python tools/gen_metrics_docs.py"

HEAD = f"""# Metrics

<!-- Written by `{COMMAND}` from the metrics in flexd/api/: change those, not this file. -->

`/metrics` of the admin API and of `server.metrics_listen` answers in Prometheus' text format, or in OpenMetrics if the
scraper asks for it. Units are base units (seconds, bytes, ratios from 0 to 1); what is not known yet is NaN. Counters
run since the daemon started; where the values of a label are named below, each has a series that begins at 0, so that
`rate()` sees the first event. Labels are bounded: a family has at most {MAX_LABEL_VALUES:,} series; beyond, counters
are summed under `other` and gauges left out. Beside these families the page has `process_*` of the daemon's process.

Alerts on them are in `deploy/prometheus/flexd.rules.yaml`, what to do about each in [the runbook](runbook.md).
"""

TIERS = tuple(by_metric_tier({}))
KNOWN_VALUES = {
    ("flexd_placement_rows", "tier"): TIERS,
    ("flexd_training_accesses", "tier"): TIERS,
    ("flexd_training_sent_bytes", "kind"): TRAFFIC_KINDS,
    ("flexd_training_sent_bytes", "link"): LINKS,
    ("flexd_ingest_rejected_messages", "reason"): MESSAGE_REASONS,
    ("flexd_ingest_rejected_accesses", "reason"): ROW_REASONS,
    ("flexd_plans", "outcome"): PLAN_OUTCOMES,
    ("flexd_plan_triggers", "trigger"): tuple(kind.value for kind in TriggerKind),
    ("flexd_plan_gate_open", "gate"): GATE_NAMES,
    ("flexd_migrations", "state"): tuple(sorted(state.value for state in FINAL_STATES)),
    ("flexd_throttle_waiting_seconds", "wait"): tuple(wait.value for wait in ThrottleReason),
    ("flexd_control_refused_messages", "kind"): REFUSED_KINDS,
    ("flexd_api_refused_requests", "reason"): REFUSED_REASONS,
}


def families() -> list[Metric]:
    """Every family that a page can have, those of optional parts too."""
    complete = DaemonStatus(
        job="", version="", stream=StreamStatus(source=""), slow_memory=SlowMemoryStatus(), unbounded_ids=IdsStatus()
    )
    return [*complete.metrics(), *RankPage().metrics(), REFUSED.of({})]


def render() -> str:
    """The whole page: a section for each word after ``flexd_``."""
    sections: dict[str, list[Metric]] = {}
    for family in families():
        sections.setdefault(family.name.split("_")[1], []).append(family)
    # What stands alone would make a section of one line each.
    alone = [found for word in list(sections) if len(sections[word]) == 1 for found in sections.pop(word)]
    lines = [HEAD, *_section("The daemon", alone)]
    for word, found in sections.items():
        lines += _section(f"`flexd_{word}_*`", found)
    return "\n".join(lines).rstrip() + "\n"


def _section(title: str, found: list[Metric]) -> list[str]:
    rows = [f"| `{_name(family)}` | {family.type} | {_labels(family)} | {_text(family)} |" for family in found]
    return [f"## {title}", "", "| name | type | labels | meaning |", "|---|---|---|---|", *rows, ""]


def _name(family: Metric) -> str:
    suffix = {"counter": "_total", "info": "_info", "summary": "_sum`, `" + family.name + "_count"}
    return family.name + suffix.get(family.type, "")


def _labels(family: Metric) -> str:
    names = list(getattr(family, "_labelnames", ())) or sorted({name for s in family.samples for name in s.labels})
    shown = []
    for name in names:
        values = KNOWN_VALUES.get((family.name, name), ())
        shown.append(f"`{name}`" + (f" ({', '.join(values)})" if values else ""))
    return ", ".join(shown)


def _text(family: Metric) -> str:
    return " ".join(family.documentation.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, COMMAND, {TARGET: render()}))
