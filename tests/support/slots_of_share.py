"""Replica slots of a collection in tests: a share of the rows of each dim-group."""

from collections.abc import Sequence

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.row_optimizers import SGD, RowOptimizer


def slots_of_share(tables: Sequence[EmbeddingTable], share: float, optimizer: RowOptimizer | None = None) -> list[int]:
    """Return one number of slots per dim-group."""
    specs = [TableSpec(t.name, t.rows, t.dim, t.dtype, (t.optimizer or optimizer or SGD()).name) for t in tables]
    return [int(share * group.rows) for group in KeySpace(specs).groups]
