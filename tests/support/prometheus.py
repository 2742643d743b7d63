"""A real Prometheus with the configuration and rules of deploy/prometheus, which scrapes every second."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from flexd.demo.ports import free_ports
from tests.support.ops_tools import tool
from tests.support.repository import ROOT

_DEPLOYED = ROOT / "deploy" / "prometheus"
Rules = dict[str, Any]

_RANGES = {"5m": "15s", "10m": "15s", "15m": "60s", "30m": "60s", "1h": "60s", "6h": "15s"}
_AGES = {"> 3600": "> 4", "> 900": "> 4", "> 120": "> 4"}


def often_evaluated(rules: Rules) -> Rules:
    """Rules whose groups have no interval of their own."""
    for group in rules["groups"]:
        group.pop("interval", None)
    return rules


def shortened(rules: Rules) -> Rules:
    """Rules with ``_RANGES`` in place of their ranges and ``_AGES`` of their ages, which fire without delay."""
    for rule in (rule for group in often_evaluated(rules)["groups"] for rule in group["rules"]):
        rule.pop("for", None)
        expression = re.sub(r"\[(\w+)\]", lambda found: f"[{_RANGES[found[1]]}]", rule["expr"])
        expression = re.sub(r"offset (\w+)", lambda found: f"offset {_RANGES[found[1]]}", expression)
        for age, short in _AGES.items():
            expression = re.sub(rf"{age}\b", short, expression)
        rule["expr"] = expression
    return rules


class Prometheus:
    """Scrapes ``targets``, ``host:port`` each, under the name ``flexd``.

    Args:
        directory: for its files.
        changed: makes the rules to use of those in deploy/prometheus.
    """

    def __init__(
        self, directory: Path, targets: Sequence[str], changed: Callable[[Rules], Rules] = often_evaluated
    ) -> None:
        (port,) = free_ports(1)
        config = yaml.safe_load((_DEPLOYED / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        for name in config["rule_files"]:
            rules = changed(yaml.safe_load((_DEPLOYED / name).read_text()))
            (directory / name).write_text(yaml.safe_dump(rules))
        config["rule_files"] = [str(directory / name) for name in config["rule_files"]]
        (scrape,) = config["scrape_configs"]
        scrape["static_configs"] = [{"targets": list(targets)}]
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
        found: list[dict[str, Any]] = self.get("/api/v1/query", query=expression)["result"]
        return found

    def value(self, expression: str) -> float:
        """Return the value of the only series; 0 without any."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else 0.0
