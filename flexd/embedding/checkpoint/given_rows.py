"""Rows that a caller gives a table: checked to be the same on every rank, or to fit on the rank that gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import TableSpec
from flexd.core.usage_warnings import USAGE_WARNINGS, UsageWarningKind
from flexd.embedding.exchange.collectives import Peers

if TYPE_CHECKING:
    from flexd.embedding.store.slow.tiered_rows import RowColumn

_BLOCK_ROWS = 1 << 13
# Odd 64-bit constants as int64, from SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
# OOPSLA 2014) and the golden ratio.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(first_row: int, columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return int64 []: the sum modulo 2^64, over rows, of a hash of the row's number and its bits in all ``columns``.

    Args:
        first_row: number of the first row in the table; the sums of the parts of a table add up to that of the table.
        columns: [n, c] each.
    """
    device = columns[0].device
    total = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(columns[0]), _BLOCK_ROWS):
        parts = [column[start : start + _BLOCK_ROWS] for column in columns]
        count = len(parts[0])
        mixed = torch.arange(first_row + start + 1, first_row + start + 1 + count, device=device) * _GOLDEN
        for part in parts:
            mixed = _mix(mixed + _row_bits(part))
        total += mixed.sum()
    return total


def _row_bits(part: torch.Tensor) -> torch.Tensor:
    """Return int64 [n] of [n, c]: the sum of each number's bits times a constant of its column, modulo 2^64."""
    width = part.shape[1]
    if width == 0:
        return torch.zeros(len(part), dtype=torch.int64, device=part.device)
    factors = _mix(torch.arange(1, width + 1, device=part.device) * _GOLDEN) | 1
    bits = part.contiguous().view(_INTEGERS[part.element_size()]).to(torch.int64)
    return bits.mul(factors).sum(dim=1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply the finaliser of SplitMix64 with arithmetic shifts, which is also a bijection of 64 bits that mixes."""
    x = (x ^ (x >> 30)) * _MIX[0]
    x = (x ^ (x >> 27)) * _MIX[1]
    return x ^ (x >> 31)


_NONE_GIVEN, _DOES_NOT_FIT = -1, -2


def fault_of(spec: TableSpec, first_row: int, values: torch.Tensor) -> str:
    """Return why values do not fit a table; empty if they do."""
    if values.dim() == 2 and values.shape[1] == spec.dim and 0 <= first_row <= spec.rows - values.shape[0]:
        return ""
    return (
        f"table {spec.name!r}: values of shape {tuple(values.shape)} from row {first_row} on, in {spec.rows} rows of "
        f"{spec.dim}"
    )


def agree_on_rows(
    world: Peers, table: int, spec: TableSpec, first_row: int, values: torch.Tensor | None, source: int | None,
    held: RowColumn,
) -> range:  # fmt: skip
    """Collective. Return the rows that all ranks load.

    Args:
        source: the rank whose values are loaded; None: all have values, which are compared bit for bit in the table's
            dtype.

    Raises:
        EmbeddingError: on every rank, if values do not fit the table on any, or they or the arguments differ.
    """
    fault = "" if values is None else fault_of(spec, first_row, values)
    count, digest = _NONE_GIVEN, 0
    if fault:
        count = _DOES_NOT_FIT
    elif values is not None:
        count = values.shape[0]
        if source is None:
            digest = int(fingerprint(first_row, [values.to(held.dtype)]))
    mine = torch.tensor(
        [table, first_row, -1 if source is None else source, count, digest], dtype=torch.int64, device=held.device
    )
    of_ranks = world.all_gather(mine).tolist()
    if fault:
        USAGE_WARNINGS.note(UsageWarningKind.ROW_COUNTS, f"load_rows of {fault}")
        raise EmbeddingError(f"rank {world.rank}: {fault}", remedy="[n, dim] values with first_row + n <= rows")
    faulty = [rank for rank, of_rank in enumerate(of_ranks) if of_rank[3] == _DOES_NOT_FIT]
    if faulty:
        raise EmbeddingError(
            f"load_rows of table {spec.name!r}: the values of rank {faulty[0]} do not fit",
            remedy=f"see the error of rank {faulty[0]}",
        )
    odd = [rank for rank, of_rank in enumerate(of_ranks) if of_rank[:3] != of_ranks[0][:3]]
    if odd:
        raise EmbeddingError(
            f"load_rows of table {spec.name!r}: ranks {odd} load another table, other rows or from another source than "
            f"rank 0; rank {world.rank}: from row {first_row} on",
            remedy="call load_rows with the same arguments on every rank, in the same order",
        )
    if source is not None:
        count = of_ranks[source][3]
        if count == _NONE_GIVEN:
            raise EmbeddingError(
                f"load_rows of table {spec.name!r}: rank {source} is the source and gave no values",
                remedy=f"give values on rank {source}",
            )
        return range(first_row, first_row + count)
    without = [rank for rank, of_rank in enumerate(of_ranks) if of_rank[3] == _NONE_GIVEN]
    if without:
        raise EmbeddingError(
            f"load_rows of table {spec.name!r}: ranks {without} gave no values",
            remedy="give the same values on every rank, or load those of one with source=0",
        )
    odd = [rank for rank, of_rank in enumerate(of_ranks) if of_rank != of_ranks[0]]
    if odd:
        text = f"load_rows of table {spec.name!r}, from row {first_row} on: ranks {odd} gave other values than rank 0"
        USAGE_WARNINGS.note(UsageWarningKind.DIFFERING_SEEDS, text)
        raise EmbeddingError(
            text,
            remedy="make the values from one seed or file on every rank, or load those of one rank with source=0",
        )
    return range(first_row, first_row + count)
