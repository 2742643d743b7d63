"""``flexd.DenseAdam``: Adam that moves every row at every step, as ``torch.optim.Adam`` on ``nn.Embedding``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch

from flexd.embedding import devices
from flexd.embedding.row_optimizers import Adam, GroupUpdate

_BLOCK_NUMBERS, _BLOCK_NUMBERS_OF_ACCELERATOR = 1 << 16, 1 << 24
"""Numbers of rows that are updated at once, for each thread of a processor: their copies stay in its caches."""


@dataclass(frozen=True)
class DenseAdam(Adam):
    """``Adam`` in which rows that a step does not look up have a gradient of 0 (Kingma and Ba, arXiv 1412.6980,
    algorithm 1), so that they move on by their momentum and decay.

    Equal to ``torch.optim.Adam`` (AdamW with ``decoupled_weight_decay=True``) on tables that every step looks up;
    torch's skips a table without any look-up in a step. A step reads and writes all rows that a rank holds, with their
    state: 24 bytes a number in float32. Rows in tiered storage (``fast_memory_bytes``) are refused, and
    ``flexd.prefetch`` locates the rows of the next batch without fetching them, because every step changes them.

    State, checkpoints and the daemon's ``optimizer: adam`` are those of ``Adam``.

    Raises:
        EmbeddingError: a setting below 0, or betas outside [0, 1).
    """

    moves_all_rows: ClassVar[bool] = True

    def update_groups(self, groups: Sequence[GroupUpdate], step: int) -> None:
        """Apply one step to all rows of the dim-groups; ``gradients`` are those of the rows that were looked up.

        No operation combines numbers of several rows, so that a row's result is the same on every rank that holds it.
        """
        for group in groups:
            rows, device = group.rows, group.rows.device
            wide = torch.promote_types(rows.dtype, torch.float32)
            none = torch.empty((0, rows.shape[1]), dtype=wide, device=device)
            slots = torch.cat(
                [index for index, _ in group.gradients] or [torch.empty(0, dtype=torch.int64, device=device)]
            )
            grads = torch.cat([none, *(part.to(wide) for _, part in group.gradients)])
            slots, order = slots.sort()
            grads = grads.index_select(0, order)
            each = devices.block_rows(rows, _BLOCK_NUMBERS * torch.get_num_threads(), _BLOCK_NUMBERS_OF_ACCELERATOR)
            firsts = [*range(0, len(rows), each), len(rows)]
            places = torch.searchsorted(slots, torch.tensor(firsts, device=device)).tolist()
            for (first, end), (begin, stop) in zip(pairwise(firsts), pairwise(places), strict=True):
                of_block = grads.new_zeros((end - first, rows.shape[1]))
                of_block.index_copy_(0, slots[begin:stop] - first, grads[begin:stop])
                index = torch.arange(first, end, device=device)
                self._update([replace(group, gradients=[(index, of_block)])], step)
