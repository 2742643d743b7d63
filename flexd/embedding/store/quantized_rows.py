"""Read-only rows of 8-bit numbers: a quarter of the memory, and of the bytes on the wire, of float32.

A row of ``dim`` numbers is stored as int8 [dim + 4]: the numbers, then the four bytes of a float32 scale by which they
are multiplied when they are looked up, after they have travelled.
"""

import torch

from flexd.core.keyspace import SCALE_BYTES
from flexd.embedding.devices import block_rows

_MOST = 127
_BLOCK_NUMBERS, _BLOCK_NUMBERS_OF_ACCELERATOR = 1 << 18, 1 << 24


def int8_rows(values: torch.Tensor) -> torch.Tensor:
    """Return float [n, dim] values as rows of a table with dtype "int8": [n, dim + 4], each row the nearest multiples
    of its largest absolute value / 127, which is its scale, and the bytes of the scale.

    A number that is not finite makes the scale of its row so.
    """
    rows = values.new_empty((values.shape[0], values.shape[1] + SCALE_BYTES), dtype=torch.int8)
    step = block_rows(values, _BLOCK_NUMBERS, _BLOCK_NUMBERS_OF_ACCELERATOR)
    for part, out in zip(torch.split(values, step), torch.split(rows, step), strict=True):
        wide = part.to(torch.float32)
        scale = wide.abs().amax(dim=1, keepdim=True) / _MOST
        multiples = torch.where(scale > 0, wide / scale, 0.0).round_().clamp_(-_MOST, _MOST)
        out[:, :-SCALE_BYTES] = multiples
        if len(part):  # none has a stride that cannot be viewed
            out[:, -SCALE_BYTES:] = scale.view(torch.int8)
    return rows


def scales_of(rows: torch.Tensor) -> torch.Tensor:
    """int8 [n, dim + 4] rows -> float32 [n, 1], a view of them where their bytes lie as those of float32 may."""
    if not (rows.shape[1] % SCALE_BYTES or rows.stride(0) % SCALE_BYTES or rows.storage_offset() % SCALE_BYTES):
        return rows.view(torch.float32)[:, -1:]
    return rows[:, -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)


def looked_up_dtype(stored: torch.dtype) -> torch.dtype:
    """Return the dtype of the values of stored rows."""
    return torch.float32 if stored == torch.int8 else stored


def looked_up(rows: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """Return [n, dim] values of rows, which are in the dtype of the wire or as they are stored."""
    if stored != torch.int8:
        return rows.to(stored)
    return rows[:, :-SCALE_BYTES] * scales_of(rows)


def as_stored(values: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """Return [n, dim] values as rows; int8 ones are rows already."""
    if stored != torch.int8:
        return values.to(stored)
    return values if values.dtype == torch.int8 else int8_rows(values)
