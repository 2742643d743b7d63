"""The parts of a batch joined by dtype: chosen, packed into messages and joined without work for each part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flexd.core.errors import EmbeddingError
from flexd.embedding.affinity.sample_parts import Part, SampleParts
from flexd.embedding.jagged import Jagged


class SampleBlocks:
    """The parts of a batch joined by dtype, so that a number of parts costs no kernels or messages of its own.

    Attributes:
        dense: [samples, width] of each dtype.
        lengths: int32 [parts, samples] of the jagged parts of each dtype and inner shape.
        values: [n, width] of the same, part by part.
    """

    def __init__(
        self,
        dense: list[torch.Tensor],
        lengths: list[torch.Tensor],
        values: list[torch.Tensor],
        samples: int,
        device: torch.device,
    ) -> None:
        self.dense, self.lengths, self.values, self.samples = dense, lengths, values, samples
        self.device = device

    def sample_bytes(self) -> torch.Tensor:
        """int64 [samples]: bytes of each sample in ``pack``."""
        fixed = sum(one.shape[1] * one.element_size() for one in self.dense) + sum(4 * len(n) for n in self.lengths)
        total = torch.full((self.samples,), fixed, dtype=torch.int64, device=self.device)
        for lengths, values in zip(self.lengths, self.values, strict=True):
            total += lengths.sum(0, dtype=torch.int64) * (values.shape[1] * values.element_size())
        return total

    def select(self, chosen: torch.Tensor) -> SampleBlocks:
        """Return the blocks of int64 [n] samples, in that order. Waits for the device once for each jagged block."""
        lengths, values = [], []
        for of_part, all_values in zip(self.lengths, self.values, strict=True):
            picked = of_part.index_select(1, chosen)
            values.append(all_values.index_select(0, _places(of_part, chosen, picked)))
            lengths.append(picked)
        return SampleBlocks(
            [one.index_select(0, chosen) for one in self.dense], lengths, values, len(chosen), self.device
        )

    def pack(self) -> torch.Tensor:
        """Return the blocks as uint8 [bytes]."""
        parts = [*self.dense, *self.lengths, *self.values]
        flat = [part.reshape(-1).view(torch.uint8) for part in parts if part.numel()]
        return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=self.device)

    def unpack(self, message: torch.Tensor, samples: int) -> SampleBlocks:
        """Return the blocks of another rank's message, which are laid out like these."""
        at = 0

        def next_part(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
            nonlocal at
            count = like.element_size()
            for size in shape:
                count *= size
            part = message[at : at + count].clone()  # a view of other dtype must be aligned
            at += count
            return part.view(like.dtype).view(shape)

        dense = [next_part(one, (samples, one.shape[1])) for one in self.dense]
        lengths = [next_part(one, (one.shape[0], samples)) for one in self.lengths]
        sums = torch.stack([one.sum(dtype=torch.int64) for one in lengths]).tolist() if lengths else []
        values = [next_part(one, (total, one.shape[1])) for one, total in zip(self.values, sums, strict=True)]
        return SampleBlocks(dense, lengths, values, samples, self.device)

    @staticmethod
    def join(blocks: Sequence[SampleBlocks]) -> SampleBlocks:
        """Return the samples of all blocks, block after block."""
        first = blocks[0]
        dense = [torch.cat([one.dense[at] for one in blocks]) for at in range(len(first.dense))]
        lengths, values = [], []
        for at in range(len(first.lengths)):
            of_blocks = [one.lengths[at] for one in blocks]
            joined = torch.cat(of_blocks, dim=1)
            # Values lie block by block, each part by part; they must lie part by part.
            place = torch.arange(joined.numel(), device=joined.device).view(joined.shape)
            flat_place = torch.cat([one.reshape(-1) for one in torch.split(place, [b.samples for b in blocks], dim=1)])
            order = torch.argsort(flat_place)
            flat = torch.cat([one.reshape(-1) for one in of_blocks])
            stacked = torch.cat([one.values[at] for one in blocks])
            values.append(stacked.index_select(0, _places(flat.unsqueeze(0), order, flat[order].unsqueeze(0))))
            lengths.append(joined)
        return SampleBlocks(dense, lengths, values, sum(one.samples for one in blocks), first.device)


def _places(lengths: torch.Tensor, chosen: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """Return int64 [n]: places of the values of chosen samples, part by part.

    Args:
        lengths: int32 [parts, samples].
        picked: int32 [parts, chosen], the lengths of those samples.
    """
    flat = lengths.reshape(-1).to(torch.int64)
    starts = (flat.cumsum(0) - flat).view(lengths.shape).index_select(1, chosen).reshape(-1)
    counts = picked.reshape(-1).to(torch.int64)
    before = counts.cumsum(0) - counts
    shift = (starts - before).repeat_interleave(counts)
    return shift + torch.arange(len(shift), device=lengths.device)


class BlockLayout:
    """Joins parts to blocks and divides blocks into parts.

    Raises:
        EmbeddingError: a part is on another device.
    """

    def __init__(self, parts: SampleParts, device: torch.device) -> None:
        self._parts, self._device = parts, device
        for name, part in zip(parts.names, parts.values, strict=True):
            of_part = {one.device for one in ((part.values, part.lengths) if isinstance(part, Jagged) else (part,))}
            if of_part != {device}:
                raise EmbeddingError(
                    f"{name} is on {', '.join(sorted(map(str, of_part)))}, the tables on {device}",
                    remedy="move the whole batch to the device of the tables in the loader",
                )
        self._dense: dict[torch.dtype, list[int]] = {}
        self._jagged: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
        # In an order that all ranks share: a mapping may have its names in another order on each.
        for at in sorted(range(len(parts.values)), key=lambda at: parts.names[at]):
            part = parts.values[at]
            if isinstance(part, Jagged):
                self._jagged.setdefault((part.values.dtype, part.values.shape[1:]), []).append(at)
            else:
                self._dense.setdefault(part.dtype, []).append(at)

    def blocks(self) -> SampleBlocks:
        """Return the blocks of the batch. Waits for the device once for each jagged block.

        Raises:
            EmbeddingError: lengths of a part do not fit its values.
        """
        parts, samples = self._parts.values, self._parts.samples
        dense, lengths, values = [], [], []
        for of_dtype in self._dense.values():
            dense.append(torch.cat([_flat(parts[at]) for at in of_dtype], dim=1))
        for of_kind in self._jagged.values():
            jagged = [part for at in of_kind if isinstance(part := parts[at], Jagged)]
            of_parts = torch.stack([one.lengths for one in jagged])
            lowest = of_parts.amin(1) if samples else of_parts.new_zeros(len(jagged))
            sums = torch.stack([of_parts.sum(1), lowest.to(torch.int64)]).tolist()
            for at, one, total, low in zip(of_kind, jagged, *sums, strict=True):
                if low < 0 or total != one.values.shape[0]:
                    raise EmbeddingError(
                        f"{self._parts.names[at]} has {one.values.shape[0]} values, its lengths sum to {total}",
                        remedy="lengths are not negative and sum to the number of values",
                    )
            lengths.append(of_parts.to(torch.int32))
            values.append(torch.cat([_flat(one.values) for one in jagged]))
        return SampleBlocks(dense, lengths, values, samples, self._device)

    def batch(self, blocks: SampleBlocks) -> Any:
        """Return the batch of these samples."""
        made: list[Part | None] = [None] * len(self._parts.values)
        for at, part in self._divided(blocks):
            made[at] = part
        return self._parts.build([part for part in made if part is not None])

    def _divided(self, blocks: SampleBlocks) -> Iterator[tuple[int, Part]]:
        for of_dtype, block in zip(self._dense.values(), blocks.dense, strict=True):
            widths = [_flat(self._parts.values[at]).shape[1] for at in of_dtype]
            for at, part in zip(of_dtype, torch.split(block, widths, dim=1), strict=True):
                shape = self._parts.values[at].shape[1:]  # type: ignore[union-attr]
                yield at, part.contiguous().view(blocks.samples, *shape)
        for of_kind, lengths, values in zip(self._jagged.values(), blocks.lengths, blocks.values, strict=True):
            sizes = lengths.sum(1, dtype=torch.int64).tolist()
            for row, (at, part) in enumerate(zip(of_kind, torch.split(values, sizes), strict=True)):
                given = self._parts.values[at]
                assert isinstance(given, Jagged)  # noqa: S101
                shaped = part.reshape(len(part), *given.values.shape[1:])
                yield at, Jagged.checked(shaped, lengths[row].to(given.lengths.dtype))


def _flat(part: Part) -> torch.Tensor:
    """Return [n, width] of [n, ...]."""
    assert isinstance(part, torch.Tensor)  # noqa: S101
    return part.reshape(part.shape[0], math.prod(part.shape[1:]))
