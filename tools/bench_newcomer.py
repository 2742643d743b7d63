"""From ``git clone`` to the demo's summary, and from a trainer with TorchRec's types to its first migration.

Each with the README's own commands in a clean checkout of what is committed. ``make`` installs everything into a new
environment there, from the package index or pip's cache; ``--quick`` borrows the packages of the running interpreter
and shortens the demo.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from bench_report import check, last_line
from newcomer import (
    ROOT,
    NewcomerError,
    borrow_environment,
    clean_checkout,
    demo_command,
    first_migration_commands,
    follow,
)

DEADLINE_SECONDS = 1800.0
SHORT_DEMO = "--steps 60 --batch-size 8"
DEMO_TARGET_SECONDS = 600.0
MIGRATION_TARGET_SECONDS = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="borrowed packages and a short demo")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="flexd-newcomer-") as temporary:
        checkout = Path(temporary) / "flexd"
        begun = time.monotonic()
        clean_checkout(ROOT, checkout)
        figures["clone_seconds"] = time.monotonic() - begun
        try:
            if arguments.quick:
                borrow_environment(checkout)
            else:
                figures["install_seconds"] = follow("make .venv/.installed", checkout, seconds=DEADLINE_SECONDS).seconds
                figures["torchrec_seconds"] = follow("make torchrec", checkout, seconds=DEADLINE_SECONDS).seconds
            demo = follow(
                demo_command(checkout), checkout, seconds=DEADLINE_SECONDS,
                environment={"DEMO": SHORT_DEMO} if arguments.quick else {},
            )  # fmt: skip
            figures["demo_seconds"] = demo.seconds
            migration = follow(
                first_migration_commands(checkout), checkout, marker="COMMITTED", seconds=DEADLINE_SECONDS
            )
        except NewcomerError as error:
            print(error, file=sys.stderr)
            return 1
        figures["first_migration_seconds"] = migration.seconds
    to_demo = sum(figures.get(name, 0.0) for name in ("clone_seconds", "install_seconds", "demo_seconds"))
    figures["clone_to_demo_seconds"] = to_demo
    figures["load_per_core"] = os.getloadavg()[0] / (os.cpu_count() or 1)
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):28} {value:8.1f}")
    if arguments.json:
        moved = migration.seconds
        checks = [
            check("clone_to_demo_seconds", to_demo, f"< {DEMO_TARGET_SECONDS:g} s", to_demo < DEMO_TARGET_SECONDS),
            check(
                "first_migration_seconds", moved, f"< {MIGRATION_TARGET_SECONDS:g} s", moved < MIGRATION_TARGET_SECONDS
            ),
        ]  # fmt: skip
        print(last_line(figures, checks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
