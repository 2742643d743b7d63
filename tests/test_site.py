"""docs/ is a site whose pages and links hold together."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.support.repository import ROOT


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "runbook" / "index.html").exists()


def test_every_page_is_in_the_menu() -> None:
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    docs = ROOT / "docs"
    assert sorted(pages_of(menu)) == sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))


def pages_of(menu: list[dict[str, Any]]) -> list[str]:
    pages: list[str] = []
    for entry in menu:
        for page in entry.values():
            pages += [page] if isinstance(page, str) else pages_of(page)
    return pages
