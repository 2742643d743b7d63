"""Draw how the default settings choose: milliseconds of each step of a job, coloured by the arm that it used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Drawn = list[tuple[float, str]]
"""Seconds and arm of each step."""
COLOURS = {"chain": "#c8553d", "direct": "#e09f3e", "chain with prefetch": "#588157", "direct with prefetch": "#335c81"}


def plot_choices(cells: Mapping[str, tuple[Drawn, Mapping[str, float]]], path: Path) -> None:
    """Draw one panel for each cell.

    Args:
        cells: by name, the steps of the job, and milliseconds of others that are drawn as lines.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(cells), figsize=(5.2 * len(cells), 3.4), dpi=120, sharey=True, squeeze=False)
    for axes, (name, (steps, others)) in zip(panels[0], cells.items(), strict=True):
        for arm, colour in COLOURS.items():
            of_arm = [(at, 1000 * seconds) for at, (seconds, used) in enumerate(steps) if used == arm]
            axes.scatter(*zip(*of_arm or [(-1, 0)], strict=True), s=6, color=colour, label=arm)
        for other, ms in others.items():
            axes.axhline(ms, color="#999999", linestyle="--", linewidth=1)
            axes.annotate(other, (len(steps), ms), ha="right", va="bottom", fontsize=8, color="#666666")
        axes.set(xlim=(0, len(steps)), xlabel="step", ylim=(0, 1.15 * max([1.0, *others.values()])))
        axes.set_title(name, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("ms per step")
    figure.legend(*panels[0][0].get_legend_handles_labels(), fontsize=8, frameon=False, ncol=4, loc="lower center")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path)
    plt.close(figure)
