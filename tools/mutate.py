#!/usr/bin/env python3
"""Mutate modules of flexd with ``mutmut``, run their tests against each mutant, and print the kill rate by module.

Usage: tools/mutate.py PATH... [--tests PATH...] [--sample N] [--seconds S]      (``make mutate PATHS="..."``)

PATH is a file or folder of flexd. Its tests are by default those below the folder of tests/ with the same name, without
files marked ``long``, ``alone`` or ``slow``. Works on a copy of the tree in build/mutate. Tests are chosen for a mutant
by the functions that they call in their own process: a function that only child processes call has `no tests`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPY = ROOT / "build" / "mutate"
SETTINGS = """[mutmut]
source_paths=flexd
only_mutate=
    {modules}
also_copy=
    {copied}
do_not_mutate_patterns=
    ^raise
pytest_add_cli_args=
    --hypothesis-profile=mutate
    -mnot long and not alone and not slow
    -pno:cacheprovider
pytest_add_cli_args_test_selection=
    {tests}
process_isolation=forkserver
timeout_multiplier=5
timeout_constant=2
use_git_change_detection=false
track_dependencies=false
"""
KILLED, SURVIVED, NO_TESTS = {1, 3, 37}, {0}, {5, 33}
NOT_RUN = {None, 2, 34}


def modules_of(paths: Sequence[Path]) -> list[Path]:
    """Return the modules at and below ``paths``, relative to the repository's root."""
    found = [module for path in paths for module in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return [module.resolve().relative_to(ROOT) for module in found]


def tests_of(modules: Sequence[Path]) -> list[str]:
    """Return the folders of tests/ that mirror the folders of ``modules``, or the nearest that exist above them."""
    folders = set()
    for module in modules:
        folder = Path("tests") / module.parent.relative_to("flexd")
        while not any((ROOT / folder).glob("**/test_*.py")):
            folder = folder.parent
        folders.add(folder)
    return sorted(str(folder) for folder in folders if not folders & set(folder.parents))


def copy_tree() -> list[str]:
    """Copy the files that git knows or does not ignore; return the names at the top except the sources and tests."""
    shutil.rmtree(COPY, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    for name in names:
        target = COPY / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return sorted({name.split("/")[0] for name in names} - {"flexd", "tests", "pyproject.toml"})


def mutmut(names: Sequence[str], children: int, seconds: float) -> None:
    """Run ``mutmut run`` in the copy; what it prints goes to build/mutate/log."""
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(children), *names]
    with (COPY / "log").open("a") as log:
        process = subprocess.Popen(command, cwd=COPY, stdout=log, stderr=log, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(1.0, seconds))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def results(module: Path) -> dict[str, int | None]:
    """Return mutant -> exit status of its tests, None if they did not run."""
    file = COPY / "mutants" / f"{module}.meta"
    return dict(json.loads(file.read_text())["exit_code_by_key"]) if file.exists() else {}


def row(name: str, codes: Counter[int | None], made: int) -> str:
    killed = sum(count for code, count in codes.items() if code in KILLED)
    survived = sum(codes[code] for code in SURVIVED)
    unseen = sum(count for code, count in codes.items() if code in NO_TESTS)
    crashed = sum(count for code, count in codes.items() if code not in KILLED | SURVIVED | NO_TESTS | NOT_RUN)
    judged = killed + crashed + survived
    rate = f"{(killed + crashed) / judged:6.1%}" if judged else "     -"
    return f"{name:48} {made:6} {judged:6} {killed:6} {crashed:9} {survived:8} {unseen:8} {rate}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--tests", nargs="+", help="test files and folders instead of the mirrored folders")
    parser.add_argument("--sample", type=int, default=40, help="mutants a module at the most, by chance; 0 is all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--children", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600.0, help="limit of the whole run")
    parser.add_argument("--survivors", action="store_true", help="print the mutants that no test has killed")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    modules = modules_of(options.paths)
    settings = {"modules": modules, "copied": copy_tree(), "tests": options.tests or tests_of(modules)}
    texts = {name: "\n    ".join(map(str, values)) for name, values in settings.items()}
    (COPY / "setup.cfg").write_text(SETTINGS.format(**texts))
    # The first run makes the mutants and learns which test calls which function; no mutant has this name.
    mutmut(["none"], options.children, end - time.monotonic())
    chance = random.Random(options.seed)
    made = {module: results(module) for module in modules}
    if not any(made.values()):
        print((COPY / "log").read_text()[-3000:], file=sys.stderr)
        return 2
    chosen = [
        name for names in made.values() for name in
        (chance.sample(sorted(names), options.sample) if 0 < options.sample < len(names) else names)
    ]  # fmt: skip
    mutmut(chosen, options.children, end - time.monotonic())
    print(
        f"{'module':48} {'made':>6} {'judged':>6} {'killed':>6} {'timed out':>9} {'survived':>8} {'no tests':>8}   rate"
    )
    total: Counter[int | None] = Counter()
    for module in modules:
        codes = {name: code for name, code in results(module).items() if name in set(chosen)}
        total.update(codes.values())
        if made[module]:
            print(row(str(module), Counter(codes.values()), len(made[module])))
        if options.survivors:
            print(*(f"    survived: {name}" for name, code in codes.items() if code in SURVIVED), sep="\n")
    print(row("all", total, sum(map(len, made.values()))))
    print(f"seed {options.seed}; `cd {COPY} && mutmut show NAME` prints a mutant")
    return 0


if __name__ == "__main__":
    sys.exit(main())
