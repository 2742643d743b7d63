"""The last line that every benchmark prints with ``--json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_NAMES = ("name", "title", "strategy", "skew", "tables", "interval_steps")


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


def check(name: str, value: float, target: str, ok: bool) -> dict[str, Any]:
    return {"name": name, "value": float(value), "target": target, "ok": bool(ok)}


def last_line(figures: Any, checks: Sequence[Mapping[str, Any]]) -> str:
    """``{"figures": {name: number}, "checks": [{"name", "value", "target", "ok"}]}``."""
    return json.dumps({"figures": flat(figures), "checks": [dict(entry) for entry in checks]}, default=float)


def ending(figures: Any, checks: Sequence[Mapping[str, Any]], *, as_json: bool) -> int:
    """Print the checks that are not met, and the last line if it is asked for; return the exit code."""
    missed = [entry for entry in checks if not entry["ok"]]
    for entry in missed:
        print(f"not met: {entry['name']}: {entry['value']:.4g} (target {entry['target']})", file=sys.stderr)
    if as_json:
        print(last_line(figures, checks))
    return 1 if missed else 0
