#!/usr/bin/env python3
"""Print the slowest tests of the last ``make test`` or ``make test-all``, and their files, from pytest's JUnit reports.

Usage: tools/slowest_tests.py [FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

SLOWEST = 30
SLOWEST_FILES = 15


def read(folder: Path) -> Counter[tuple[str, str]]:
    """Return (module, test) -> seconds, set-up and tear-down included."""
    seconds: Counter[tuple[str, str]] = Counter()
    for report in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            seconds[case.get("classname", ""), case.get("name", "")] += float(case.get("time", 0))
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(".pytest_cache/durations"))
    folder = parser.parse_args().folder
    seconds = read(folder)
    if not seconds:
        print(f"no reports in {folder}: run make test or make test-all", file=sys.stderr)
        return 2
    files: Counter[str] = Counter()
    for (module, _), spent in seconds.items():
        files[module] += spent
    print(f"{len(seconds)} tests, {sum(seconds.values()):.0f} s in all processes together")
    print(f"\nslowest {SLOWEST_FILES} modules")
    for module, spent in files.most_common(SLOWEST_FILES):
        print(f"{spent:8.1f} s  {module}")
    print(f"\nslowest {SLOWEST} tests")
    for (module, name), spent in seconds.most_common(SLOWEST):
        print(f"{spent:8.1f} s  {module}::{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
