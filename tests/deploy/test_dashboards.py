"""Grafana dashboards: complete, consistent, of existing metrics. tests/e2e/test_ops.py runs their queries."""

import re
from collections import Counter

import pytest
import yaml

from tests.support.dashboards import DASHBOARDS, load, panels, queries
from tests.support.deployed import known_metrics
from tests.support.ops_tools import run_tool
from tests.support.repository import ROOT

BOARDS = [load(path) for path in DASHBOARDS]
UNITS = {"short", "s", "bytes", "Bps", "ops", "percentunit"}
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"}

each_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])


def test_names_are_unique_and_equal_the_file_names():
    assert [board["uid"] for board in BOARDS] == [path.stem for path in DASHBOARDS]
    assert len({board["title"] for board in BOARDS}) == len(BOARDS) == 3


@each_board
def test_dashboard_is_complete(board):
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "training_job", "instance"}
    assert Counter(panel["id"] for panel in board["panels"]).most_common(1)[0][1] == 1
    for panel in panels(board):
        assert panel["title"], "a panel without a title"
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"], panel["title"]
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names)


@each_board
def test_queries_name_metrics_that_exist_and_select_the_chosen_daemons(board):
    known = known_metrics() | PROCESS
    texts = [query.expression for query in queries(board)]
    texts += [variable["query"]["query"] for variable in board["templating"]["list"][1:]]
    texts += [annotation["expr"] for annotation in board["annotations"]["list"]]
    for text in texts:
        named = set(re.findall(r"\b(?:flexd|process)_\w+", text))
        assert set() < named <= known, text
    for query in queries(board):
        selectors = re.findall(r"\b(?:flexd|process)_\w+(\{[^}]*\})?", query.expression)
        assert all('instance=~"$instance"' in selector for selector in selectors), query


@each_board
def test_queries_are_valid_promql(board, tmp_path):
    """This version of promtool has no parser of single queries, so they are checked as recording rules."""
    rules = [
        {"record": f"check:query{number}", "expr": query.filled("job", "a", "5m")}
        for number, query in enumerate(queries(board))
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = run_tool("promtool", "check", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_of_an_alert_is_on_a_dashboard():
    shown = {
        name for board in BOARDS for query in queries(board) for name in re.findall(r"flexd_\w+", query.expression)
    }
    alarmed = set(re.findall(r"\b(flexd_\w+)\b", "\n".join(re.findall(r"expr: (.*)", RULES.read_text()))))
    assert alarmed - shown <= {"flexd_healthy", "flexd_start_time_seconds"}


RULES = ROOT / "deploy" / "prometheus" / "flexd.rules.yaml"
TESTS = ROOT / "deploy" / "prometheus" / "flexd.tests.yaml"
RUNBOOK = ROOT / "docs" / "runbook.md"


def rules() -> list[dict]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def test_every_alert_has_a_remedy():
    found = alerts()
    assert len(found) >= 20
    for name, alert in found.items():
        assert alert["labels"]["severity"] in ("info", "warning", "critical"), name
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}, name


def test_runbook_urls_and_sections_match():
    links = {name: alert["annotations"]["runbook_url"] for name, alert in alerts().items()}
    headings = re.findall(r"^#+ (.*)$", RUNBOOK.read_text(), re.MULTILINE)
    # The anchors that GitHub makes of headings.
    known = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for name, link in links.items():
        page, _, anchor = link.partition("#")
        assert ROOT / page == RUNBOOK, name
        assert anchor == name.lower()
        assert anchor in known, f"docs/runbook.md has no section {name}"
    assert re.findall(r"^## (.*)$", RUNBOOK.read_text(), re.MULTILINE) == list(links)


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
