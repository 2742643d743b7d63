"""The Grafana dashboards of deploy/grafana, and their queries with Grafana's variables put in."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.repository import ROOT

DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))


@dataclass(frozen=True)
class Query:
    board: str
    panel: str
    expression: str

    def filled(self, training_job: str, instance: str, interval: str) -> str:
        """As Grafana sends it: every variable and built-in range replaced."""
        text = self.expression.replace("$training_job", training_job).replace("$instance", instance)
        text = re.sub(r"\$__(rate_interval|range)", interval, text)
        assert "$" not in text, text
        return text


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Without the rows between them."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries(board: dict[str, Any]) -> list[Query]:
    return [
        Query(board["uid"], panel["title"], target["expr"]) for panel in panels(board) for target in panel["targets"]
    ]
