"""A real Prometheus scrapes a real daemon, fed by a real broker, while ranks train: rules and dashboards find data."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tansu_broker import TansuBroker

from flexd.demo.processes import Ranks, free_ports
from flexd.demo.runner import Demo
from flexd.demo.setup import DemoBatches, DemoOptions, EmulatedCluster
from flexd.stream.kafka.sink import KafkaSink
from flexd.stream.kafka.topic_admin import ensure_topic
from flexd.stream.sample_kinds import SampleKind
from tests.support.dashboards import DASHBOARDS, load, queries
from tests.support.flexd_processes import DAEMON_START_SECONDS
from tests.support.ops_tools import tool
from tests.support.repository import ROOT
from tests.support.until import until

_DEPLOYED = ROOT / "deploy" / "prometheus"


class Prometheus:
    """Scrapes ``target``, ``host:port``, under the name ``flexd``; its files are in ``directory``."""

    def __init__(self, directory: Path, target: str) -> None:
        (port,) = free_ports(1)
        config = yaml.safe_load((_DEPLOYED / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        for name in config["rule_files"]:
            rules = yaml.safe_load((_DEPLOYED / name).read_text())
            for group in rules["groups"]:
                group.pop("interval", None)
            (directory / name).write_text(yaml.safe_dump(rules))
        config["rule_files"] = [str(directory / name) for name in config["rule_files"]]
        (scrape,) = config["scrape_configs"]
        scrape["static_configs"] = [{"targets": [target]}]
        file = directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        with (directory / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    tool("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={directory / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log, stderr=log, env={**os.environ, "GOMAXPROCS": "1"},
            )  # fmt: skip
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def get(self, path: str, **parameters: str) -> Any:
        """Return the ``data`` of a response."""
        answer = self._client.get(path, params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def is_ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        return self.get("/api/v1/query", query=expression)["result"]

    def value(self, expression: str) -> float:
        """Return the value of the only series; 0 without any."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else 0.0


pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(240)]

JOB = "flexd-demo"
INTERVAL = "20s"
"""Of rates, in place of Grafana's."""

MAY_BE_EMPTY = {
    ("flexd-stream", "Accesses adjusted"): "no access was late or from the future",
    ("flexd-stream", "Accesses rejected"): "no good message has a bad access",
    ("flexd-stream", "Messages rejected, and values not read"): "values are those of stream.mapping",
    ("flexd-control", "Refused messages and chunks"): "nothing was refused; chunks are counted from the start",
    ("flexd-control", "Chunks held back"): "no chunk waits without a limit",
    ("flexd-overview", "Slow memory: misses and wait"): "all rows are fast",
    ("flexd-overview", "Slow memory: bytes"): "all rows are fast",
    ("flexd-overview", "Unbounded ids: look-ups with a row of their own"): "all ids are rows",
    ("flexd-overview", "Unbounded ids: rows that change ids"): "all ids are rows",
}


class Monitored:
    """Broker, daemon, two ranks and Prometheus; the configuration of the latter is that of deploy/prometheus."""

    def __init__(self, directory: Path) -> None:
        self.broker = TansuBroker()
        self.broker.start()
        try:
            self._start(directory)
        except BaseException:
            self.close()
            raise

    def _start(self, directory: Path) -> None:
        options = DemoOptions(
            cluster=EmulatedCluster(2, 1, 0.0),
            batches=DemoBatches(4_000, batch_size=24, samples=SampleKind.IMPRESSIONS),
            kafka=self.broker.bootstrap_servers,
            out=directory,
        )
        self._demo = Demo(options, directory)
        (metrics_port,) = free_ports(1)
        self.target = f"127.0.0.1:{metrics_port}"
        config_file = directory / "flexd.yaml"
        config = yaml.safe_load(config_file.read_text())
        config["planner"] |= {"min_samples": 20_000, "drift_interval_seconds": 1.0}
        config["server"]["metrics_listen"] = self.target
        config_file.write_text(yaml.safe_dump(config))
        setup = self._demo.setup
        ensure_topic(self.broker.bootstrap_servers, setup.topic, partitions=2, timeout_seconds=20.0)
        self.daemon = self._demo.daemon
        self.daemon.start(DAEMON_START_SECONDS)
        self.ranks = Ranks(setup)
        self.prometheus = Prometheus(directory, self.target)
        self.get, self.query, self.value = self.prometheus.get, self.prometheus.query, self.prometheus.value
        # One message that is none, so that rejections have a reason to show.
        sink = KafkaSink(self.broker.bootstrap_servers, setup.topic)
        sink.send(b"no message of flexd")
        sink.flush(10.0)
        sink.close()

    def close(self) -> None:
        if hasattr(self, "prometheus"):
            self.prometheus.close()
        if hasattr(self, "ranks"):
            self.ranks.stop()
        if hasattr(self, "daemon"):
            self.daemon.kill()
        self.broker.stop()

    def page(self) -> str:
        return httpx.get(f"http://{self.target}/metrics", timeout=20).text


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    tool("prometheus")
    job = Monitored(tmp_path_factory.mktemp("ops"))
    try:
        until(job.prometheus.is_ready, 60, "prometheus does not answer")
        moved = "sum(flexd_migrations_total) > 0 and sum(flexd_plans_total) > 1 and sum(flexd_snapshots_total) > 1"
        until(lambda: job.ranks.running() and job.query(moved), 120, job.page)
        # Rates need two samples of a series, and the newest family has just come.
        scraped = time.time()
        until(lambda: job.value("min(timestamp(flexd_migrations_total))") > scraped + 2, 60)
        yield job
    finally:
        job.close()


def test_every_panel_finds_data(job: Monitored) -> None:
    asked = [query for path in DASHBOARDS for query in queries(load(path))]
    asked = [query for query in asked if (query.board, query.panel) not in MAY_BE_EMPTY]
    assert asked

    def without_data() -> dict[tuple[str, str], str]:
        return {
            (query.board, query.panel): query.expression
            for query in asked
            if not job.query(query.filled(JOB, ".*", INTERVAL))
        }

    # Drift, for one, is looked at later than anything else.
    until(lambda: not without_data(), 200, without_data)


def test_what_is_shown_is_what_happens(job: Monitored) -> None:
    """A query may find data and still mean nothing: the figures that people look at first are compared."""
    assert job.value("flexd_ready") == float(job.daemon.status()["ready"]) == 1.0
    assert job.value("flexd_control_ranks_ready") == 2
    assert job.value("flexd_ingest_accesses_total") > 10_000
    assert job.value(f'sum(increase(flexd_training_sent_bytes_total{{link="inter"}}[{INTERVAL}]))') > 0
    assert job.value('flexd_placement_rows{tier="device"} + ignoring(tier) flexd_placement_rows{tier="node"}') > 0
    rejected = job.query("sum by (reason) (flexd_ingest_rejected_messages_total)")
    shown = [float(series["value"][1]) for series in rejected]
    assert [value for value in shown if value] == [1.0], "every reason is there, one was met"


def test_rules_are_evaluated_and_a_healthy_job_alarms_nobody(job: Monitored) -> None:
    until(
        lambda: all(
            rule["health"] == "ok" for group in job.get("/api/v1/rules")["groups"] for rule in group["rules"]
        ),
        30,
        lambda: json.dumps(job.get("/api/v1/rules"))[:3000],
    )  # fmt: skip
    rules = [rule for group in job.get("/api/v1/rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 25
    assert [alert for alert in job.get("/api/v1/alerts")["alerts"] if alert["state"] == "firing"] == []
    for name in {rule["name"] for rule in rules if rule["type"] == "recording"} - {
        "flexd:ingest_rejected_accesses:ratio_rate10m",
        "flexd:ingest_unread_values:ratio_rate10m",  # of stream.mapping
    }:
        until(lambda name=name: job.query(name), 60, name)


def test_promtool_takes_the_page(job: Monitored) -> None:
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=job.page(), capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode in (0, 3), done.stdout, done.stderr) == (True, "", "")


def test_a_daemon_that_is_gone_is_noticed(job: Monitored) -> None:
    """Last: nothing runs after it."""
    job.daemon.kill()
    until(lambda: job.value('up{job="flexd"}') == 0, 30)
    pending = 'ALERTS{alertname="FlexdDown", alertstate="pending"}'
    until(lambda: job.query(pending), 30, lambda: job.get("/api/v1/alerts"))
