"""The picture of a run: step time and inter-node bytes over the steps, with the plans marked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import ConfigError
from flexd.demo.screen import TIMED
from flexd.demo.summary import RunRecord


def _smooth(values: npt.NDArray[np.float64], window: int) -> npt.NDArray[np.float64]:
    total = np.cumsum(np.insert(values.astype(np.float64), 0, 0.0))
    ends = np.minimum(np.arange(len(values)) + window // 2 + 1, len(values))
    starts = np.maximum(np.arange(len(values)) - window // 2, 0)
    means: npt.NDArray[np.float64] = (total[ends] - total[starts]) / (ends - starts)
    return means


def plot_run(record: RunRecord, path: Path) -> None:
    """Write the picture in the format of the suffix.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib", remedy="pip install 'flexd[plot]'") from error
    window = max(1, record.setup.steps // 60)
    step_seconds = record.step_seconds()
    if step_seconds:
        figure, (times, axes) = plt.subplots(2, figsize=(9, 8), dpi=120, height_ratios=(3, 2), sharex=True)
        _draw_times(times, record, step_seconds, window)
    else:
        figure, axes = plt.subplots(figsize=(9, 5), dpi=120)
        _title(axes, record)
    _draw_bytes(axes, record, window)
    axes.set_xlabel("training step")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=3, fontsize=8, frameon=False)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}", remedy="give a writable path ending in .png") from error
    finally:
        plt.close(figure)


def _draw_times(axes: Any, record: RunRecord, step_seconds: Mapping[str, npt.NDArray[Any]], window: int) -> None:
    for name, style, colour in (
        ("row_wise", ":", "#888888"),
        ("chain", "--", "#1f77b4"),
        ("run_ahead", "-", "#9467bd"),
        ("plans", "-", "#d62728"),
    ):
        # The first step is start-up.
        smooth = _medians(step_seconds[name][1:], window) * 1e3
        axes.plot(np.arange(1, 1 + len(smooth)), smooth, style, color=colour, label=TIMED[name], linewidth=1.6)
    _mark_plans(axes, record)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("ms a step")
    _title(axes, record)
    axes.legend(fontsize=8, frameon=False)
    axes.grid(alpha=0.25)


def _draw_bytes(axes: Any, record: RunRecord, window: int) -> None:
    exchange = record.job_total("all_to_all_inter_bytes")
    sync = record.job_total("sync_inter_bytes")
    migration = record.job_total("migration_inter_bytes")
    step = np.arange(record.setup.steps)
    for name, values, style, colour in (
        ("row-wise, no dedup", record.reference["row_wise"], ":", "#888888"),
        ("row-wise, dedup", record.reference["row_wise_dedup"], "--", "#888888"),
        ("flexd: all-to-all (critical path)", exchange, "-", "#1f77b4"),
        ("flexd: all-to-all + replica sync + migration", exchange + sync + migration, "-", "#d62728"),
    ):
        axes.plot(step, _smooth(values, window) * 1e-6, style, color=colour, label=name, linewidth=1.6)
    _mark_plans(axes, record)
    axes.set_yscale("log")
    axes.set_ylabel("inter-node MB per step, whole job")
    axes.grid(alpha=0.25, which="both")


def _mark_plans(axes: Any, record: RunRecord) -> None:
    for index, at in enumerate(record.plan_steps()):
        axes.axvline(at, color="#2ca02c", alpha=0.5, linewidth=1, label="plan applied" if index == 0 else None)


def _title(axes: Any, record: RunRecord) -> None:
    setup = record.setup
    link = f", {setup.link_mbit:g} Mbit/s a node" if setup.link_mbit else ""
    axes.set_title(
        f"{Path(setup.trace).stem}: {setup.nodes} nodes x {setup.local_ranks} ranks{link}, replica budget "
        f"{setup.replica_budget:.0%} of the rows"
    )


def _medians(values: npt.NDArray[Any], window: int) -> npt.NDArray[np.float64]:
    """Return the running median over ``window`` steps each way: a single slow step is another process's."""
    padded = np.pad(values.astype(np.float64), window, mode="edge")
    running: npt.NDArray[np.float64] = np.median(
        np.lib.stride_tricks.sliding_window_view(padded, 2 * window + 1), axis=1
    )
    return running
