"""flexd keeps the embedding rows of a running recommender training in the right places.

The trainer's side is imported from here; names load on first use, so that the daemon and the CLI start without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flexd.core.placement import RankLayout
    from flexd.embedding.bag_collection import EmbeddingBagCollection, EmbeddingBagTable
    from flexd.embedding.checkpoint.changed_tables import ChangedTables
    from flexd.embedding.checkpoint.series import CheckpointSeries
    from flexd.embedding.checkpoint.sharded_state import ShardedState
    from flexd.embedding.collection import EmbeddingCollection
    from flexd.embedding.connect import connect
    from flexd.embedding.embedding import Embedding, embed_all
    from flexd.embedding.embedding_table import EmbeddingTable
    from flexd.embedding.features import Jagged
    from flexd.embedding.ids.hash_ids import hash_ids
    from flexd.embedding.optimizer_handle import JoinedOptimizer
    from flexd.embedding.prefetch.loop import prefetch
    from flexd.embedding.row_optimizers import SGD, Adagrad, Adam, DenseAdam, RowWiseAdagrad, RowWiseAdam
    from flexd.embedding.store.quantized_rows import int8_rows
    from flexd.embedding.table_rules import TableRules
    from flexd.embedding.tap import Tap
    from flexd.stream.publisher import Publisher

_HOMES = {
    "Adagrad": "flexd.embedding.row_optimizers",
    "Adam": "flexd.embedding.row_optimizers",
    "ChangedTables": "flexd.embedding.checkpoint.changed_tables",
    "CheckpointSeries": "flexd.embedding.checkpoint.series",
    "DenseAdam": "flexd.embedding.row_optimizers",
    "Embedding": "flexd.embedding.embedding",
    "EmbeddingBagCollection": "flexd.embedding.bag_collection",
    "EmbeddingBagTable": "flexd.embedding.bag_collection",
    "EmbeddingCollection": "flexd.embedding.collection",
    "EmbeddingTable": "flexd.embedding.embedding_table",
    "Jagged": "flexd.embedding.features",
    "JoinedOptimizer": "flexd.embedding.optimizer_handle",
    "Publisher": "flexd.stream.publisher",
    "RankLayout": "flexd.core.placement",
    "RowWiseAdagrad": "flexd.embedding.row_optimizers",
    "RowWiseAdam": "flexd.embedding.row_optimizers",
    "SGD": "flexd.embedding.row_optimizers",
    "ShardedState": "flexd.embedding.checkpoint.sharded_state",
    "TableRules": "flexd.embedding.table_rules",
    "Tap": "flexd.embedding.tap",
    "connect": "flexd.embedding.connect",
    "embed_all": "flexd.embedding.embedding",
    "hash_ids": "flexd.embedding.ids.hash_ids",
    "int8_rows": "flexd.embedding.store.quantized_rows",
    "prefetch": "flexd.embedding.prefetch.loop",
}

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "ChangedTables",
    "CheckpointSeries",
    "DenseAdam",
    "Embedding",
    "EmbeddingBagCollection",
    "EmbeddingBagTable",
    "EmbeddingCollection",
    "EmbeddingTable",
    "Jagged",
    "JoinedOptimizer",
    "Publisher",
    "RankLayout",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "ShardedState",
    "TableRules",
    "Tap",
    "__version__",
    "connect",
    "embed_all",
    "hash_ids",
    "int8_rows",
    "prefetch",
]


def __getattr__(name: str) -> Any:
    if name == "affinity":
        return import_module("flexd.affinity")
    if name not in _HOMES:
        raise AttributeError(f"module 'flexd' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)  # asked once
    return found
