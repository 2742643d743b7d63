"""Arguments, checks, JSON, rounds in turns and the machine's state, for all cases.

A case is a module of ``tools.bench.cases`` with ``SECTIONS``, functions from the options to an ``Outcome``, and perhaps
``arguments(parser)``, which adds options of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import platform
import signal
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[2]
_NAMES = ("name", "title", "strategy", "skew", "tables", "interval_steps")


class Outcome(NamedTuple):
    """Nested figures, and checks as ``check`` makes them."""

    figures: Mapping[str, Any]
    checks: Sequence[Mapping[str, Any]]


class Skipped(Exception):
    """This machine lacks what a section needs; the message says what."""


def check(name: str, value: float, target: str, ok: bool) -> dict[str, Any]:
    return {"name": name, "value": float(value), "target": target, "ok": bool(ok)}


def at_most(name: str, value: float, limit: float) -> dict[str, Any]:
    return check(name, value, f"<= {limit:g}", value <= limit)


def at_least(name: str, value: float, limit: float) -> dict[str, Any]:
    return check(name, value, f">= {limit:g}", value >= limit)


def flat(figures: Any, prefix: str = "") -> dict[str, float]:
    """The numbers of nested figures, named by their path; booleans as 0 and 1, texts left out.

    Entries of a list are called by what tells them apart (``_NAMES``) if they have that, otherwise counted.
    """
    if isinstance(figures, Mapping):
        named = [(str(key), value) for key, value in figures.items()]
    elif isinstance(figures, Sequence) and not isinstance(figures, str):
        named = [(_name(entry, i), entry) for i, entry in enumerate(figures)]
    elif isinstance(figures, str) or figures is None:
        return {}
    else:
        return {prefix: float(figures)}
    numbers: dict[str, float] = {}
    for key, value in named:
        numbers |= flat(value, f"{prefix}/{key}" if prefix else key)
    return numbers


def _name(entry: Any, position: int) -> str:
    if isinstance(entry, Mapping):
        for key in _NAMES:
            if key in entry:
                return entry[key] if isinstance(entry[key], str) else f"{key} {entry[key]}"
    return str(position)


def show(figures: Any) -> None:
    """Print figures: the numbers of one path on a line."""
    lines: dict[str, list[str]] = {}
    for path, value in flat(figures).items():
        where, _, name = path.rpartition("/")
        lines.setdefault(where, []).append(f"{name} {value:,.0f}" if value.is_integer() else f"{name} {value:.4g}")
    for where, parts in lines.items():
        print(f"{where or 'all'}: {', '.join(parts)}")


def in_turns(runs: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Return what each run returned in each round after the first ``warm_up``.

    They take turns, so that what else the machine does falls on all alike.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + warm_up):
        for name, run in runs.items():
            value = run()
            if turn >= warm_up:
                found[name].append(value)
    return found


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    run()
    return clock() - started


def of_runs(answers: Sequence[Mapping[str, Any]], spread_of: Sequence[str] = ()) -> dict[str, Any]:
    """Return the medians of several runs' figures; for those named ``spread_of`` also [least, most] of the runs.

    Raises:
        ValueError: no run, or runs with different figures.
    """
    if not answers:
        raise ValueError("no run to take medians of")
    first = answers[0]
    if any(answer.keys() != first.keys() for answer in answers):
        raise ValueError(f"runs differ: {sorted(set().union(*answers) - set.intersection(*map(set, answers)))}")
    whole: dict[str, Any] = {}
    for key, value in first.items():
        values = [answer[key] for answer in answers]
        if isinstance(value, Mapping):
            whole[key] = of_runs(values, spread_of)
        else:
            whole[key] = value if isinstance(value, str) else statistics.median(values)
            if key in spread_of and len(values) > 1:
                whole[f"{key}_spread"] = [min(values), max(values)]
    return whole


def environment() -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} processors", "load": os.getloadavg()[0],
        "python": platform.python_version(), "torch": version("torch"), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


# The peak of ``resource.getrusage`` is not used: it cannot be reset, and a child inherits that of its parent through
# ``exec``. So it can be larger than anything that the measured part ever held.


def reset_peak() -> bool:
    """Make the current resident memory the new peak. Returns False where the system does not allow that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def resident_bytes(process: int | str = "self") -> int:
    return _status_bytes(process, "VmRSS")


def peak_resident_bytes(process: int | str = "self") -> int:
    """Return the largest resident memory since the process started or ``reset_peak`` was called."""
    return _status_bytes(process, "VmHWM")


def _status_bytes(process: int | str, field: str) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def exit_on_sigterm() -> None:
    """SIGTERM unwinds the stack, so that context managers clean up."""

    def leave(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def cases() -> list[str]:
    from tools.bench import cases as package

    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def main(words: Sequence[str] | None = None) -> int:
    """``python -m tools.bench CASE [--quick] [--json] [--only SECTION ...] ...``"""
    words = sys.argv[1:] if words is None else list(words)
    if not words or words[0] not in cases():
        print(f"usage: python -m tools.bench CASE [--help]\ncases: {', '.join(cases())}", file=sys.stderr)
        return 2
    case, parser = parser_of(words[0])
    return run(case.SECTIONS, parser.parse_args(words[1:]))


def parser_of(name: str) -> tuple[Any, argparse.ArgumentParser]:
    """Return the module of a case and the parser of its options."""
    case = importlib.import_module(f"tools.bench.cases.{name}")
    parser = argparse.ArgumentParser(
        f"tools.bench {name}", description=case.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small problem, with checks, in under a minute")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--only", nargs="+", choices=list(case.SECTIONS), help="sections; all unless given")
    if hasattr(case, "arguments"):
        case.arguments(parser)
    return case, parser


def run(sections: Mapping[str, Callable[[Namespace], Outcome]], options: Namespace) -> int:
    """Run the chosen sections and print figures and checks, with ``--json`` also as a last line; return the exit code.

    Figures of a case with several sections are named by their section first.
    """
    exit_on_sigterm()
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    figures: dict[str, Any] = {}
    checks: list[Mapping[str, Any]] = []
    for name in options.only or sections:
        try:
            outcome = sections[name](options)
        except Skipped as reason:
            print(f"skipped: {name}: {reason}")
            continue
        found: Mapping[str, Any] = {name: outcome.figures} if len(sections) > 1 else outcome.figures
        show(found)
        figures |= found
        checks += outcome.checks
    for entry in checks:
        state = "met" if entry["ok"] else "not met"
        print(f"{state}: {entry['name']}: {entry['value']:.4g} (target {entry['target']})", file=sys.stderr)
    if options.json:
        print(json.dumps({"figures": flat(figures), "checks": [dict(entry) for entry in checks]}, default=float))
    return 0 if all(entry["ok"] for entry in checks) else 1
