"""What tests of the tools share: the tools' folder on the path, and a machine that can emulate a cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))


@pytest.fixture(scope="session")
def can_emulate() -> None:
    from cluster import why_not

    if (reason := why_not()) is not None:
        pytest.skip(f"an emulated cluster {reason}")
