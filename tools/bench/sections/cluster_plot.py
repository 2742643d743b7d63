"""Draw the strategies of ``tools.bench cluster``: milliseconds per step, computing and exposed communication apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LABELS = {
    "TorchRec row-wise": "TorchRec row-wise",
    "TorchRec row-wise, fp16": "TorchRec row-wise, fp16 wire",
    "direct, dedup": "flexd: dedup",
    "chain": "flexd: dedup + two hops",
    "chain, prefetch pipeline": "flexd: + prefetch pipeline",
    "tiers": "flexd: two hops + plan",
    "tiers, prefetch pipeline": "flexd: prefetch pipeline + plan",
}
"""Strategies that are drawn, from top to bottom."""


def plot_steps(answers: Sequence[Mapping[str, Any]], rate_mbit: float, path: Path) -> None:
    """Draw one panel for each skew: the median step on the limited link, of which the part beyond the step on an
    unlimited link is exposed communication. Strategies that did not run are left out."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        1, len(answers), figsize=(5.2 * len(answers), 3.4), dpi=120, sharey=True, squeeze=False
    )
    for axes, answer in zip(panels[0], answers, strict=True):
        rows = answer["parts"]["dense part"]
        names = [name for name in LABELS if name in rows]
        step = [rows[name]["step_seconds"] * 1e3 for name in names]
        exposed = [max(0.0, rows[name]["exposed_seconds"] * 1e3) for name in names]
        unlimited = [s - e for s, e in zip(step, exposed, strict=True)]
        labels = [LABELS[name] for name in names]
        axes.barh(labels, unlimited, color="#9db4c0", label="step, unlimited link")
        axes.barh(labels, exposed, left=unlimited, color="#c8553d", label="exposed communication")
        for at, (total, waited) in enumerate(zip(step, exposed, strict=True)):
            axes.text(total, at, f" {total:.0f} ({waited:.0f})", va="center", fontsize=8)
        axes.set_xlim(0, max(step) * 1.22)
        axes.set_xlabel("ms per step (of it exposed)")
        axes.set_title(f"Zipf {answer['zipf']:g}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    # The panels share the axis.
    panels[0][0].invert_yaxis()
    panels[0][0].tick_params(axis="y", labelsize=9)
    figure.suptitle(f"2 nodes x 2 ranks on CPUs, gloo, {rate_mbit:g} Mbit/s a node, with a dense part", fontsize=10)
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, frameon=False, ncol=2, loc="lower center")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path)
    plt.close(figure)
