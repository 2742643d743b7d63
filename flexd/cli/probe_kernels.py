"""Measure FBGEMM's kernels of look-up with pooling and of update on this device, for ``probe --kernels``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexd.cli.blocks import Block, Facts, Table
from flexd.cli.options import check_file
from flexd.core import units

if TYPE_CHECKING:
    from flexd.topology.kernel_file import KernelMeasurements


def measure_to_file(out: Path, seconds: float, *, cuda: bool) -> KernelMeasurements:
    """Measure for about so many seconds and write the file.

    Raises:
        ConfigError: seconds that allow nothing.
        MissingExtraError: FBGEMM is not installed.
        TopologyError: the device has not the memory, or the file cannot be written.
    """
    import torch

    from flexd.embedding.kernels.probe import KernelBudget, measure_kernels
    from flexd.topology.kernel_design import ON_CUDA, KernelRange, designed_sets
    from flexd.topology.kernel_file import write_kernels

    budget = KernelBudget(seconds)
    check_file("--kernels", out)
    limits = ON_CUDA if cuda else KernelRange()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    from flexd.torchrec.fused_kernels import FbgemmKernels

    measured = measure_kernels(FbgemmKernels(limits.memory_bytes, device), designed_sets(limits), device, budget)
    write_kernels(measured, out)
    return measured


def kernel_document(measured: KernelMeasurements, out: Path) -> dict[str, Any]:
    """Return what was measured as JSON values; the file has every set."""
    return {
        "file": str(out),
        "kernels": measured.kernels,
        "device": measured.device,
        "source": measured.source,
        "sets": len(measured.sets),
    }


def kernel_blocks(measured: KernelMeasurements, out: Path) -> list[Block]:
    """Return the conditions of the run and the seconds by phase."""
    import numpy as np

    rows = []
    read = np.array([float((one.ids * one.row_bytes).sum()) for one in measured.sets])
    for name, seconds in (("look-up and pooling", measured.look_up_seconds), ("update", measured.update_seconds)):
        rate = float(np.median(read / np.maximum(seconds, 1e-12)))
        rows.append((name, units.seconds(float(np.median(seconds))), units.size(rate) + "/s"))
    columns = ("kernel", "median time", "median rate of rows")
    return [
        Table(f"Kernels of {measured.kernels} on {measured.device}", columns, tuple(rows), frozenset(columns[1:])),
        Facts("", (("written", str(out)), ("source", measured.source))),
    ]
