"""Configurations and findings of the doctor's checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from flexd.config.load import parse_config
from flexd.config.model import Config
from flexd.doctor.finding import Finding


def config(directory: Path, **sections: object) -> Config:
    return parse_config(
        {
            "job": "j",
            "tables": [{"name": "items", "rows": 100, "dim": 4}],
            "stream": {"source": {"kind": "file_log", "path": str(directory / "log")}},
            "state": {"dir": str(directory / "state")},
            "sketch": {"memory_bytes": 2**20},
            **sections,
        }
    )


def levels(findings: Iterable[Finding]) -> Counter[str]:
    return Counter(f"{found.check} {found.level.value}" for found in findings)
