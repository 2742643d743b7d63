"""The picture of a run: inter-node bytes a step over time, with the plans marked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from flexd.core.errors import ConfigError
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
    scale = 1e-6
    figure, axes = plt.subplots(figsize=(9, 5), dpi=120)
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
        axes.plot(step, _smooth(values, window) * scale, style, color=colour, label=name, linewidth=1.6)
    for index, at in enumerate(record.plan_steps()):
        axes.axvline(at, color="#2ca02c", alpha=0.5, linewidth=1, label="plan applied" if index == 0 else None)
    axes.set_yscale("log")
    axes.set_xlabel("training step")
    axes.set_ylabel("inter-node MB per step, whole job")
    axes.set_title(
        f"{Path(record.setup.trace).stem}: {record.setup.nodes} nodes x {record.setup.local_ranks} ranks, replica "
        f"budget {record.setup.replica_budget:.0%} of the rows"
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=3, fontsize=8, frameon=False)
    axes.grid(alpha=0.25, which="both")
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}", remedy="give a writable path ending in .png") from error
    finally:
        plt.close(figure)
