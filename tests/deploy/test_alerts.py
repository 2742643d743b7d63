"""Alerts: their rules, their unit tests, their sections in the runbook, and the metrics they name."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.support.ops_tools import run_tool
from tests.support.repository import ROOT

RULES = ROOT / "deploy" / "prometheus" / "flexd.rules.yaml"
TESTS = ROOT / "deploy" / "prometheus" / "flexd.tests.yaml"
RUNBOOK = ROOT / "docs" / "runbook.md"


def rules() -> list[dict]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_alert_has_a_remedy():
    found = alerts()
    assert len(found) >= 20
    for name, alert in found.items():
        assert alert["labels"]["severity"] in ("info", "warning", "critical"), name
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}, name


def test_runbook_urls_and_sections_match():
    links = {name: alert["annotations"]["runbook_url"] for name, alert in alerts().items()}
    known = anchors(RUNBOOK)
    for name, link in links.items():
        page, _, anchor = link.partition("#")
        assert ROOT / page == RUNBOOK, name
        assert anchor == name.lower()
        assert anchor in known, f"docs/runbook.md has no section {name}"
    sections = re.findall(r"^## (.*)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sections == list(links)


def test_every_alert_has_a_test_that_fires_and_one_that_does_not():
    names = [test["name"] for test in yaml.safe_load(TESTS.read_text())["tests"]]
    for alert in alerts():
        assert f"{alert} fires" in names
        assert any(name.startswith(f"{alert} is quiet: ") for name in names)
    for test in yaml.safe_load(TESTS.read_text())["tests"]:
        alert, _, _ = test["name"].partition(" ")
        values = [sample["value"] for check in test["promql_expr_test"] for sample in check["exp_samples"]]
        assert all(f'alertname="{alert}"' in check["expr"] for check in test["promql_expr_test"])
        assert values[-1] == (1 if test["name"].endswith(" fires") else 0), test["name"]


def test_promtool_unit_tests_pass():
    done = run_tool("promtool", "test", "rules", TESTS, seconds=200)
    assert done.returncode == 0, done.stdout + done.stderr
