"""Write generated files that are checked in, or report that they are out of date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(description: str | None, command: str, files: Mapping[Path, str]) -> int:
    """Whole texts by file. Returns the exit status: 1 if ``--check`` finds one that is out of date."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a file is out of date")
    check, status = parser.parse_args().check, 0
    for path, text in files.items():
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is out of date: run {command}", file=sys.stderr)
            status = 1
    return status
