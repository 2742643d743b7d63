#!/usr/bin/env python3
"""Print the oldest release of torch that pyproject.toml allows, for ``make test-torch-floor``."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def torch_floor(project: Path = PROJECT) -> str:
    """Return the version after ``torch>=``, with all three numbers."""
    needed = (Requirement(each) for each in tomllib.loads(project.read_text())["project"]["dependencies"])
    (torch,) = (each for each in needed if each.name == "torch")
    (least,) = (each.version for each in torch.specifier if each.operator == ">=")
    return least if least.count(".") == 2 else f"{least}.0"


if __name__ == "__main__":
    print(torch_floor())
