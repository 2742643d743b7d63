"""Writes docs/metrics.md from the collectors; ``--check`` only says whether it is up to date."""

from __future__ import annotations

import sys
import types
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from generated import write_or_check
from prometheus_client.core import Metric

from flexd.control.daemon.message_receiver import REFUSED_KINDS
from flexd.control.daemon.throttle import ThrottleReason
from flexd.daemon.label_values import MIGRATION_STATES, SCALE_OUT_REFUSALS
from flexd.ingest.stats import MESSAGE_REASONS, ROW_REASONS
from flexd.operations.gates import GATE_NAMES
from flexd.operations.planning import PLAN_OUTCOMES
from flexd.operations.training_monitor import LINKS, TRAFFIC_KINDS
from flexd.operations.triggers import TriggerKind
from flexd.scaleout.delta_sender import FAILURE_REASONS
from flexd.server import figures
from flexd.server.access import REFUSED_REASONS
from flexd.server.api_metrics import RefusalsCollector
from flexd.server.figures import TIER_NAMES, DaemonFigures
from flexd.server.metrics import MAX_LABEL_VALUES, FiguresCollector

TARGET = Path(__file__).parents[1] / "docs" / "metrics.md"
COMMAND = "python tools/gen_metrics_docs.py"

HEAD = f"""# Metrics

<!-- Written by `{COMMAND}` from the collectors in flexd/server/: change those, not this file. -->

`/metrics` of the admin API and of `server.metrics_listen` answers in Prometheus' text format, or in OpenMetrics if the
scraper asks for it. Units are base units (seconds, bytes, ratios from 0 to 1); what is not known yet is NaN. Counters
run since the daemon started; where the values of a label are named below, each has a series that begins at 0, so that
`rate()` sees the first event. Labels are bounded: a family has at most {MAX_LABEL_VALUES:,} series; beyond, counters
are summed under `other` and gauges left out. Beside these families the page has `process_*` of the daemon's process.

Alerts on them are in `deploy/prometheus/flexd.rules.yaml`, what to do about each in [the runbook](runbook.md).
"""

KNOWN_VALUES = {
    ("flexd_placement_rows", "tier"): TIER_NAMES,
    ("flexd_training_accesses", "tier"): TIER_NAMES,
    ("flexd_training_sent_bytes", "kind"): TRAFFIC_KINDS,
    ("flexd_training_sent_bytes", "link"): LINKS,
    ("flexd_ingest_rejected_messages", "reason"): MESSAGE_REASONS,
    ("flexd_ingest_rejected_accesses", "reason"): ROW_REASONS,
    ("flexd_plans", "outcome"): PLAN_OUTCOMES,
    ("flexd_plan_triggers", "trigger"): tuple(kind.value for kind in TriggerKind),
    ("flexd_plan_gate_open", "gate"): GATE_NAMES,
    ("flexd_plan_gates_overridden", "gate"): GATE_NAMES,
    ("flexd_migrations", "state"): MIGRATION_STATES,
    ("flexd_throttle_waiting_seconds", "wait"): tuple(wait.value for wait in ThrottleReason),
    ("flexd_control_refused_messages", "kind"): REFUSED_KINDS,
    ("flexd_scale_out_refused", "reason"): SCALE_OUT_REFUSALS,
    ("flexd_scale_out_push_failures", "reason"): FAILURE_REASONS,
    ("flexd_api_refused_requests", "reason"): REFUSED_REASONS,
}


def families() -> list[Metric]:
    """Every family that a page can have, those of optional parts too."""
    complete = _complete(DaemonFigures)
    return [*FiguresCollector(lambda: complete).collect(), *RefusalsCollector(dict).collect()]


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


def _complete(kind: type[Any]) -> Any:
    """An instance with every optional part there and every number zero."""
    hints = typing.get_type_hints(kind, vars(figures))
    return kind(**{field.name: _zero(hints[field.name]) for field in fields(kind)})


def _zero(hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _zero(next(argument for argument in arguments if argument is not type(None)))
    if origin is tuple:
        return tuple(_zero(argument) for argument in arguments)
    if origin is not None:
        return {}
    return _complete(hint) if is_dataclass(hint) else hint()


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, COMMAND, {TARGET: render()}))
