"""``flexd.export_table`` and ``flexd.table_blocks``: tables of a collection for serving, block by block."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flexd.core.errors import EmbeddingError
from flexd.embedding.checkpoint.whole_tables import gather_block
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.serving.serving_table import POOLINGS, ServingTable, quantize_rows

BLOCK_BYTES = 32 * 2**20


def table_blocks(
    collection: EmbeddingCollection, name: str, block_rows: int | None = None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Collective. Iterate over (first row, [n, dim] rows in host memory) of a table, in order, on every rank.

    A rank holds one block at a time; rows of slow memory are read without moving into frames. Take all blocks on every
    rank, with equal ``block_rows``, and do not train before the last one.

    Args:
        block_rows: rows of a block; default: 32 MiB of them.

    Raises:
        EmbeddingError: the table is unknown, or a block has no rows.
    """
    if name not in collection.keyspace.index:
        raise EmbeddingError(f"no table {name!r}", remedy=f"one of {', '.join(collection.keyspace.index)}")
    if block_rows is not None and block_rows < 1:
        raise EmbeddingError(f"table {name!r}: blocks of {block_rows} rows", remedy="at least 1")
    return _blocks(collection, name, block_rows)


@torch.no_grad()
def _blocks(collection: EmbeddingCollection, name: str, block_rows: int | None) -> Iterator[tuple[int, torch.Tensor]]:
    store, homes = collection._homes(collection.keyspace.index[name])
    each = block_rows or max(1, BLOCK_BYTES // (store.rows.shape[1] * store.rows.element_size()))
    collection.engine.settle()
    for first in range(0, homes.rows, each):
        block = range(first, min(first + each, homes.rows))
        with collection.traffic.uncounted():
            rows = gather_block(collection._groups.world, homes, store.rows, block)
        yield first, rows.cpu()


@torch.no_grad()
def export_table(
    collection: EmbeddingCollection,
    name: str,
    *,
    int8: bool = False,
    pooling: str | None = None,
    rank: int | None = 0,
    block_rows: int | None = None,
) -> ServingTable | None:
    """Collective. Return a read-only copy of a table in host memory, that ``torch.export`` takes.

    Beside the result on the ranks that keep it, a rank holds one block of the table.

    Args:
        int8: int8 rows, each with one float32 scale: numbers differ by at most max|row| / 254 from the table's.
        pooling: None: rows, as ``nn.Embedding``; "sum" or "mean": bags, as ``nn.EmbeddingBag``.
        rank: the rank that keeps the table; None: every rank.
        block_rows: as in ``table_blocks``.

    Returns:
        The module in ``eval()`` mode; None on other ranks.

    Raises:
        EmbeddingError: the table or the pooling is unknown, there is no such rank, or int8 rows are asked of a table
            with numbers that are not finite (all on every rank).
    """
    if pooling not in POOLINGS:
        raise EmbeddingError(f"a serving table of pooling {pooling!r}", remedy="None, 'sum' or 'mean'")
    if rank is not None and not 0 <= rank < collection.layout.world_size:
        raise EmbeddingError(f"table {name!r} on rank {rank}", remedy=f"below {collection.layout.world_size}, or None")
    blocks = table_blocks(collection, name, block_rows)
    table = collection.tables[collection.keyspace.index[name]]
    rows: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    if rank in (None, collection.rank):
        rows = torch.empty((table.rows, table.dim), dtype=torch.int8 if int8 else collection.dtype_of(name))
        scales = torch.empty(table.rows, dtype=torch.float32) if int8 else None
    for first, block in blocks:
        if int8:
            _check_finite(name, first, block)
        if rows is None:
            continue
        some = slice(first, first + block.shape[0])
        if scales is None:
            rows[some] = block
        else:
            rows[some], scales[some] = quantize_rows(block)
    return None if rows is None else ServingTable(rows, scales, pooling).eval()


def _check_finite(name: str, first: int, block: torch.Tensor) -> None:
    """Every rank has the block, so that all raise, or none."""
    broken = (~block.float().isfinite()).any(dim=1).nonzero()
    if broken.numel():
        raise EmbeddingError(
            f"table {name!r}: row {first + int(broken[0])} has a number that is not finite in float32",
            remedy="export it without int8, or load_rows over it",
        )
