"""helm, kubectl, prometheus, promtool and chromium, as ``make ops-tools`` leaves them or as the machine has them."""

import shutil
import subprocess

import pytest

from tests.support.repository import ROOT

CACHE = ROOT / ".ops-tools" / "bin"


def tool(name: str) -> str:
    """The program's path; skips the test if it is not here."""
    cached = CACHE / name
    found = str(cached) if cached.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here: make ops-tools")
    return found


def run_tool(name: str, *arguments: object, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Its end, in the repository's root, whatever its exit status."""
    command = [tool(name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=ROOT, check=False)
