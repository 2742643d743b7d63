"""Devices of tensors, what is made and ordered on them, and rows as bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from flexd.embedding.store.slow.tiered_rows import RowColumn

HALF_DTYPES = (torch.bfloat16, torch.float16)
_ALIGNED_NUMBERS = 64


def allocated_device(device: torch.device | str | None) -> torch.device:
    """Return the device of a tensor that is allocated on ``device``: ``cuda`` becomes ``cuda:0`` or the current one,
    None the default one, ``with torch.device(...)`` included."""
    return torch.empty(0, device=device).device


_CONTAINER_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


def memory_bytes(device: torch.device, local_ranks: int) -> int:
    """Return the memory of a rank: its accelerator's, or its part of the host's or of what its container may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # another version of cgroups, or "max"
            most = min(most, int(Path(path).read_text()))
    return most // local_ranks


def in_host_memory(tensor: RowColumn) -> bool:
    """Return whether numpy reads the tensor without a copy; its loops over bits and masks are then the faster ones."""
    return tensor.device.type == "cpu"


def block_rows(rows: torch.Tensor, of_host: int, of_accelerator: int) -> int:
    """Return how many [n, dim] rows have so many numbers, by the memory that they are in; at least one."""
    return max(1, (of_host if in_host_memory(rows) else of_accelerator) // rows.shape[1])


def order_of(numbers: torch.Tensor) -> torch.Tensor:
    """Return int64 [n], an order of int64 [n] numbers in which they ascend; that of equal ones is not defined."""
    if not in_host_memory(numbers):
        return torch.sort(numbers).indices
    # With the processor's vector instructions: a fifth of torch's time.
    return torch.from_numpy(np.argsort(numbers.numpy()))


def stable_order_of(numbers: torch.Tensor) -> torch.Tensor:
    """Return int64 [n], the order of int64 [n] numbers from 0 on in which they ascend; equal ones stay as they are."""
    if not in_host_memory(numbers):
        return torch.sort(numbers, stable=True).indices
    # numpy sorts 16 bits by their values, in a tenth of the time of a comparing sort.
    keys = numbers.numpy()
    order, bits = np.argsort(keys.astype(np.uint16), kind="stable"), 16
    while len(keys) and int(keys.max()) >> bits:
        order = order[np.argsort((keys[order] >> bits).astype(np.uint16), kind="stable")]
        bits += 16
    return torch.from_numpy(order)


def uploaded(
    numbers: Sequence[int] | Sequence[Sequence[int]] | npt.NDArray[np.int64], device: torch.device
) -> torch.Tensor:
    """Copy integers of the host to a device, as int64. The host waits for nothing: a copy from memory that is not
    pinned would wait until the device has run everything that is queued."""
    on_host = torch.tensor(numbers, dtype=torch.int64)
    if device.type != "cuda" or not torch.cuda.is_available():
        return on_host.to(device)
    return on_host.pin_memory().to(device, non_blocking=True)


def zeros(shapes: Sequence[tuple[int, int]], dtypes: Sequence[torch.dtype], device: torch.device) -> list[torch.Tensor]:
    """Return a tensor of zeros of each shape and dtype, with one kernel for all of a dtype."""
    made: list[torch.Tensor | None] = [None] * len(shapes)
    for dtype in dict.fromkeys(dtypes):
        chosen = [at for at, one in enumerate(dtypes) if one == dtype]
        # Each begins where a kernel may read and write vectors.
        sizes = [-(-shapes[at][0] * shapes[at][1] // _ALIGNED_NUMBERS) * _ALIGNED_NUMBERS for at in chosen]
        parts = torch.zeros(sum(sizes), dtype=dtype, device=device).split_with_sizes(sizes)
        for at, part in zip(chosen, parts, strict=True):
            rows, width = shapes[at]
            made[at] = part[: rows * width].view(rows, width)
    return [tensor for tensor in made if tensor is not None]


class Numbers:
    """The numbers 0, 1, 2 ... on a device, kept between steps. For one stream."""

    def __init__(self, device: torch.device) -> None:
        self._all = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def device(self) -> torch.device:
        return self._all.device

    def first(self, count: int) -> torch.Tensor:
        """Return int64 [count], which must not be changed."""
        kept = self._all
        if len(kept) < count:
            with torch.inference_mode(mode=False):
                kept = torch.arange(count + count // 4, device=kept.device)
            self._all = kept
        return kept[:count]


def ordered(
    section: torch.Tensor, sections: int, zeros: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Order rows by section, stably.

    Args:
        section: int64 [n] in 0..sections - 1.
        zeros: int64 [sections] for the numbers.

    Returns:
        (int64 [n] places ordered by section, int64 [sections] number of rows in each).
    """
    order = torch.sort(section, stable=True).indices
    return order, (section.new_zeros(sections) if zeros is None else zeros).scatter_(0, section, 1, reduce="add")


def sum_by_place(
    places: torch.Tensor, numbers: torch.Tensor | None, size: int, zeros: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum int64 [n] numbers (None: 1 each) by their place in 0..size - 1: int64 [size], in ``zeros`` if it is given."""
    sums = places.new_zeros(size) if zeros is None else zeros
    if numbers is None:
        return sums.scatter_(0, places, 1, reduce="add")
    return sums.scatter_add_(0, places, numbers)


def packed(*columns: torch.Tensor) -> torch.Tensor:
    """Return uint8 [n, bytes] of [n, c] columns."""
    return torch.cat([column.contiguous().view(torch.uint8) for column in columns if column.shape[1]], dim=1)


def unpacked(rows: torch.Tensor, columns: Sequence[RowColumn]) -> list[torch.Tensor]:
    """Return [n, c] of the width and dtype of each of ``columns``; inverse of ``packed``. Bytes behind them are
    ignored."""
    found, first = [], 0
    for column in columns:
        end = first + column.shape[1] * column.element_size()
        # A copy: part of a row may begin at an offset that is invalid for a wider dtype.
        part = rows[:, first:end].clone(memory_format=torch.contiguous_format)
        found.append(part.view(column.dtype) if end > first else part.to(column.dtype))
        first = end
    return found
