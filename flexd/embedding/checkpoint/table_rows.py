"""Bring the home rows of a table to the ranks that ask for consecutive ones, and back.

Homes are cyclic, so that popular rows spread; a checkpoint has consecutive rows, so that it is valid for any number of
ranks and any sharding type. Arithmetic determines which rows a rank sends to another, so only values are sent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import QUANTIZED, HomeRun, Homes, TableSpec
from flexd.core.usage_warnings import USAGE_WARNINGS, UsageWarningKind
from flexd.embedding.devices import packed, unpacked
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.store.quantized_rows import as_stored, scales_of
from flexd.embedding.store.slow.tiered_rows import RowColumn

MAX_WINDOW_BYTES = 32 * 2**20
"""Bytes that each rank sends at once, and receives at once."""


@dataclass(frozen=True)
class TableHomes:
    """Homes and blocks of the rows of one table.

    Attributes:
        rank: this rank.
    """

    homes: Homes
    table: int
    rank: int

    @property
    def rows(self) -> int:
        return self.homes.keyspace.tables[self.table].rows

    @property
    def world_size(self) -> int:
        return self.homes.layout.world_size

    def blocks(self, rows: int | None = None) -> list[range]:
        """Return consecutive rows for each rank, equal to those of ``torch.chunk`` and DTensor's ``Shard``, of the
        first ``rows``, default all."""
        rows = self.rows if rows is None else rows
        each = -(-rows // self.world_size)
        ends = [min(rank * each, rows) for rank in range(self.world_size + 1)]
        return [range(ends[rank], ends[rank + 1]) for rank in range(self.world_size)]

    def only(self, rank: int, rows: range | None = None) -> list[range]:
        """Return the rows, default all, for one rank, and none for the others."""
        wanted = range(self.rows) if rows is None else rows
        return [wanted if each == rank else range(0) for each in range(self.world_size)]

    def run(self, rows: range) -> HomeRun:
        """Return those of consecutive rows that have their home here, ascending."""
        return self.homes.run(self.table, self.rank, rows)

    def write(self, held: RowColumn, first_row: int, values: torch.Tensor) -> None:
        """Write those of [n, c] rows from ``first_row`` on that have their home here; ``held`` is [slots, c]."""
        run = self.run(range(first_row, first_row + values.shape[0]))
        if run.rows:
            mine = values[run.rows.start - first_row : run.rows.stop - first_row : run.rows.step]
            held[run.slots] = mine.to(held.device, held.dtype)

    def by_home(self, rows: range, device: torch.device) -> tuple[torch.Tensor, list[int]]:
        """Return int64 [n] places of consecutive rows ordered by their homes, and how many have each rank as home."""
        part = self.homes.part_of[self.table]
        first_key = int(self.homes.keyspace.first_key[self.table])
        home = torch.arange(first_key + rows.start, first_key + rows.stop, device=device) % part.span + part.first_rank
        counts = [len(self.homes.run(self.table, rank, rows).rows) for rank in range(self.world_size)]
        return torch.sort(home, stable=True).indices, counts

    def windows(self, row_bytes: int, wanted: Sequence[range]) -> Iterator[list[range]]:
        """Cut what each rank wants into windows in which no rank sends or receives more than ``MAX_WINDOW_BYTES``."""
        # A row's place has 8 bytes.
        takers, most = max(1, sum(map(bool, wanted))), MAX_WINDOW_BYTES // max(8, row_bytes)
        # Of so many consecutive rows a home has one.
        each = max(1, min(most, most // takers * self.homes.part_of[self.table].span))
        for first in range(0, max(map(len, wanted)), each):
            yield [rows[first : first + each] for rows in wanted]


def collect(
    world: Peers, homes: TableHomes, columns: Sequence[RowColumn], wanted: Sequence[range], device: torch.device
) -> list[torch.Tensor]:
    """Collective. Return of each column [n, c] the n rows that this rank wants, on ``device``.

    Args:
        columns: [slots, c] of the home rows here; as many as are to travel together.
        wanted: consecutive rows of each rank, equal on all ranks.
    """
    row_bytes = sum(column.shape[1] * column.element_size() for column in columns)
    whole = [torch.empty((len(wanted[homes.rank]), c.shape[1]), dtype=c.dtype, device=device) for c in columns]
    first = 0
    for window in homes.windows(row_bytes, wanted):
        order, received = homes.by_home(window[homes.rank], columns[0].device)
        parts = {rows: packed(*(column[homes.run(rows).slots] for column in columns)) for rows in dict.fromkeys(window)}
        counts = [len(parts[rows]) for rows in window]
        sent = torch.cat([parts[rows] for rows in window])
        # Of what is as large as a window no more than two are in memory at once.
        del parts
        arrived = _exchanged(world, sent, counts, received)
        del sent
        ordered = torch.empty_like(arrived).index_copy_(0, order, arrived)
        del arrived
        for column, part in zip(whole, unpacked(ordered, columns), strict=True):
            column[first : first + len(order)] = part
        first += len(order)
    return whole


def distribute(
    world: Peers,
    homes: TableHomes,
    columns: Sequence[RowColumn],
    given: Sequence[range],
    values: Sequence[torch.Tensor],
) -> None:
    """Collective. Write the rows that ranks give to their homes; the inverse of ``collect``.

    Args:
        values: of each column [n, c], the n rows that this rank gives; ignored if it gives none.
    """
    row_bytes, device = sum(column.shape[1] * column.element_size() for column in columns), columns[0].device
    first = 0
    for window in homes.windows(row_bytes, given):
        order, sent = homes.by_home(window[homes.rank], device)
        rows = torch.empty((0, row_bytes), dtype=torch.uint8, device=device)
        if len(order):
            parts = [part[first : first + len(order)] for part in values]
            rows = packed(*(part.to(device, held.dtype) for part, held in zip(parts, columns, strict=True)))
        first += len(order)
        runs = [homes.run(rows) for rows in window]
        received = [len(run.rows) for run in runs]
        rows = rows.index_select(0, order)
        arrived = _exchanged(world, rows, sent, received)
        del rows
        for held, part in zip(columns, unpacked(arrived, columns), strict=True):
            for run, of_run in zip(runs, part.split_with_sizes(received), strict=True):
                held[run.slots] = of_run


def _exchanged(world: Peers, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """Collective. Send uint8 [n, bytes] rows, so many to each rank, and return those that arrive."""
    width = rows.shape[1]
    return world.all_to_all(rows.view(-1), [n * width for n in sent], [n * width for n in received]).view(-1, width)


_BLOCK_ROWS = 1 << 13
# Odd 64-bit constants as int64, from SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
# OOPSLA 2014) and the golden ratio.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    return part.contiguous().view(_INTEGERS[part.element_size()]).to(torch.int64).mul(factors).sum(dim=1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply the finaliser of SplitMix64 with arithmetic shifts, which is also a bijection of 64 bits that mixes."""
    x = (x ^ (x >> 30)) * _MIX[0]
    x = (x ^ (x >> 27)) * _MIX[1]
    return x ^ (x >> 31)


_NONE_GIVEN, _DOES_NOT_FIT = -1, -2


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
    fault = ""
    quantized = spec.dtype == QUANTIZED
    width = held.shape[1] if values is not None and quantized and values.dtype == held.dtype else spec.dim
    if values is not None and not (
        values.dim() == 2 and values.shape[1] == width and 0 <= first_row <= spec.rows - values.shape[0]
    ):
        fault = (
            f"table {spec.name!r}: values of shape {tuple(values.shape)} from row {first_row} on, in {spec.rows} rows "
            f"of {spec.dim}"
        )
    elif values is not None and quantized and not scales_of(as_stored(values, held.dtype)).isfinite().all():
        fault = f"table {spec.name!r}: values that are not finite, which {spec.dtype} rows cannot have"
    count, digest = _NONE_GIVEN, 0
    if fault:
        count = _DOES_NOT_FIT
    elif values is not None:
        count = values.shape[0]
        if source is None:
            digest = int(fingerprint(first_row, [as_stored(values, held.dtype)]))
    mine = torch.tensor(
        [table, first_row, -1 if source is None else source, count, digest], dtype=torch.int64, device=held.device
    )
    of_ranks = world.all_gather(mine).tolist()
    if fault:
        USAGE_WARNINGS.note(UsageWarningKind.ROW_COUNTS, f"load_rows of {fault}")
        raise EmbeddingError(f"rank {world.rank}: {fault}", remedy="[n, dim] values with first_row + n <= rows")
    what = f"load_rows of table {spec.name!r}"
    faulty = [rank for rank, of_rank in enumerate(of_ranks) if of_rank[3] == _DOES_NOT_FIT]
    if faulty:
        raise EmbeddingError(
            f"{what}: the values of rank {faulty[0]} do not fit", remedy=f"see the error of rank {faulty[0]}"
        )
    odd = [rank for rank, of_rank in enumerate(of_ranks) if of_rank[:3] != of_ranks[0][:3]]
    if odd:
        raise EmbeddingError(
            f"{what}: ranks {odd} load another table, other rows or from another source than rank 0; rank "
            f"{world.rank}: from row {first_row} on",
            remedy="call load_rows with the same arguments on every rank, in the same order",
        )
    givers = range(len(of_ranks)) if source is None else [source]
    without = [rank for rank in givers if of_ranks[rank][3] == _NONE_GIVEN]
    if without:
        raise EmbeddingError(
            f"{what}: ranks {without} gave no values",
            remedy="give the same values on every rank, or load those of one with source=0",
        )
    odd = [rank for rank in givers if of_ranks[rank] != of_ranks[givers[0]]]
    if odd:
        text = f"{what}, from row {first_row} on: ranks {odd} gave other values than rank 0"
        USAGE_WARNINGS.note(UsageWarningKind.DIFFERING_SEEDS, text)
        raise EmbeddingError(
            text,
            remedy="make the values from one seed or file on every rank, or load those of one rank with source=0",
        )
    return range(first_row, first_row + of_ranks[givers[0]][3])
