"""docs/ is a site whose pages and links hold together, and every page is in its menu."""

import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "runbook" / "index.html").exists()
