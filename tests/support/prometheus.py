"""A real Prometheus with the configuration and rules of deploy/prometheus, which scrapes every second."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import yaml

from flexd.demo.ports import free_ports
from tests.support.ops_tools import tool
from tests.support.repository import ROOT

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
        found: list[dict[str, Any]] = self.get("/api/v1/query", query=expression)["result"]
        return found

    def value(self, expression: str) -> float:
        """Return the value of the only series; 0 without any."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else 0.0
