"""Several runs of one setting as one: medians of all figures, and how far the runs were apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

SPREAD_OF = ("step_seconds", "unlimited_step_seconds", "exposed_seconds", "row_wise_over_exposed")
"""Figures of a strategy of which the least and the most of any run stand beside the median."""


def median_answer(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one answer of the form of each: numbers are medians, texts those of the first run.

    Every strategy has ``spread``: figure -> [least, most] of the runs. A difference of losses is the largest of any
    run.

    Raises:
        ValueError: no run, or runs of different strategies.
    """
    if not answers:
        raise ValueError("no run to take medians of")
    whole: dict[str, Any] = _median([{**answer, "loss_differences": {}} for answer in answers])
    whole["loss_differences"] = {
        name: max(answer["loss_differences"][name] for answer in answers) for name in answers[0]["loss_differences"]
    }
    for title, rows in whole["parts"].items():
        for name, row in rows.items():
            of_runs = [answer["parts"][title][name] for answer in answers]
            row["spread"] = {
                figure: [pick(of_run[figure] for of_run in of_runs) for pick in (min, max)]
                for figure in SPREAD_OF
                if figure in row
            }
    whole["runs"] = len(answers)
    return whole


def _median(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        if any(value.keys() != first.keys() for value in values):
            raise ValueError(f"runs differ: {sorted(set().union(*values) - set.intersection(*map(set, values)))}")
        return {key: _median([value[key] for value in values]) for key in first}
    return first if isinstance(first, str) else median(values)
