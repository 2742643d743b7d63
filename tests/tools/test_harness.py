"""Figures as numbers by path, medians of runs, and the one JSON object at the end."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

import pytest

from tools.bench.harness import Outcome, Skipped, at_least, at_most, flat, in_turns, of_runs, run


def test_figures_are_named_by_their_path_and_lists_by_what_tells_them_apart() -> None:
    nested = {
        "a": {"b": 1, "text": "no number", "none": None},
        "rows": [{"name": "x", "v": 2.5}, {"tables": 3}, [True]],
    }
    assert flat(nested) == {"a/b": 1.0, "rows/x/v": 2.5, "rows/tables 3/tables": 3.0, "rows/2/0": 1.0}


def test_runs_become_medians_with_their_spread() -> None:
    def answer(step: float) -> dict[str, Any]:
        return {"chain": {"step_seconds": step, "bytes": 7}, "name": "t"}

    whole = of_runs([answer(0.3), answer(0.1), answer(0.2)], ("step_seconds",))
    assert whole == {"chain": {"step_seconds": 0.2, "step_seconds_spread": [0.1, 0.3], "bytes": 7}, "name": "t"}
    assert "step_seconds_spread" not in of_runs([answer(0.3)], ("step_seconds",))["chain"]
    with pytest.raises(ValueError, match=r"runs differ: .*other"):
        of_runs([answer(0.3), answer(0.3) | {"other": 1}])
    with pytest.raises(ValueError, match="no run"):
        of_runs([])


def test_turns_alternate_and_the_first_do_not_count() -> None:
    order: list[str] = []

    def one(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = in_turns({"a": lambda: one("a"), "b": lambda: one("b")}, rounds=2, warm_up=1)
    assert order == ["a", "b"] * 3
    assert found == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


@pytest.mark.parametrize("met", [True, False])
def test_a_case_ends_with_one_json_object(capsys: pytest.CaptureFixture[str], met: bool) -> None:
    def measured(options: Namespace) -> Outcome:
        return Outcome({"seconds": 2.0}, [at_most("seconds", 2.0, 3.0 if met else 1.0), at_least("seconds", 2.0, 1.0)])

    def skipped(options: Namespace) -> Outcome:
        raise Skipped("needs root")

    code = run({"one": measured, "two": skipped}, Namespace(quick=True, json=True, only=None))
    printed = capsys.readouterr()
    assert code == (0 if met else 1)
    assert "skipped: two: needs root" in printed.out
    assert ("not met: seconds: 2 (target <= 1)" in printed.err) is not met
    last = json.loads(printed.out.splitlines()[-1])
    assert last["figures"] == {"one/seconds": 2.0}
    assert last["checks"][0] == {"name": "seconds", "value": 2.0, "target": "<= 3" if met else "<= 1", "ok": met}
