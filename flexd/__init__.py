"""flexd keeps the embedding rows of a running recommender training in the right places.

The trainer's side is imported from here; names load on first use, so that the daemon and the CLI start without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flexd.core.layout import RankLayout
    from flexd.embedding.bag_collection import EmbeddingBagCollection, EmbeddingBagTable
    from flexd.embedding.checkpoint.checkpoint import ShardedState, load_checkpoint, save_checkpoint
    from flexd.embedding.checkpoint.series import CheckpointSeries
    from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
    from flexd.embedding.connect import connect
    from flexd.embedding.dense_adam import DenseAdam
    from flexd.embedding.embed_all import embed_all
    from flexd.embedding.embedding import Embedding
    from flexd.embedding.jagged import Jagged
    from flexd.embedding.joined_collections import JoinedCollections, join_collections
    from flexd.embedding.joined_optimizer import JoinedOptimizer
    from flexd.embedding.prefetch.loop import prefetch
    from flexd.embedding.row_optimizers import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
    from flexd.embedding.serving.export import export_table, table_blocks
    from flexd.embedding.serving.serving_table import ServingTable
    from flexd.embedding.table_rules import TableRules
    from flexd.embedding.tap.tap import Tap
    from flexd.stream.publisher import Publisher

_HOMES = {
    "Adagrad": "flexd.embedding.row_optimizers",
    "Adam": "flexd.embedding.row_optimizers",
    "CheckpointSeries": "flexd.embedding.checkpoint.series",
    "DenseAdam": "flexd.embedding.dense_adam",
    "Embedding": "flexd.embedding.embedding",
    "EmbeddingBagCollection": "flexd.embedding.bag_collection",
    "EmbeddingBagTable": "flexd.embedding.bag_collection",
    "EmbeddingCollection": "flexd.embedding.collection",
    "EmbeddingTable": "flexd.embedding.collection",
    "Jagged": "flexd.embedding.jagged",
    "JoinedCollections": "flexd.embedding.joined_collections",
    "JoinedOptimizer": "flexd.embedding.joined_optimizer",
    "Publisher": "flexd.stream.publisher",
    "RankLayout": "flexd.core.layout",
    "RowWiseAdagrad": "flexd.embedding.row_optimizers",
    "RowWiseAdam": "flexd.embedding.row_optimizers",
    "SGD": "flexd.embedding.row_optimizers",
    "ServingTable": "flexd.embedding.serving.serving_table",
    "ShardedState": "flexd.embedding.checkpoint.checkpoint",
    "TableRules": "flexd.embedding.table_rules",
    "Tap": "flexd.embedding.tap.tap",
    "connect": "flexd.embedding.connect",
    "embed_all": "flexd.embedding.embed_all",
    "export_table": "flexd.embedding.serving.export",
    "join_collections": "flexd.embedding.joined_collections",
    "load_checkpoint": "flexd.embedding.checkpoint.checkpoint",
    "save_checkpoint": "flexd.embedding.checkpoint.checkpoint",
    "prefetch": "flexd.embedding.prefetch.loop",
    "table_blocks": "flexd.embedding.serving.export",
}

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "CheckpointSeries",
    "DenseAdam",
    "Embedding",
    "EmbeddingBagCollection",
    "EmbeddingBagTable",
    "EmbeddingCollection",
    "EmbeddingTable",
    "Jagged",
    "JoinedCollections",
    "JoinedOptimizer",
    "Publisher",
    "RankLayout",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "ServingTable",
    "ShardedState",
    "TableRules",
    "Tap",
    "__version__",
    "connect",
    "embed_all",
    "export_table",
    "join_collections",
    "load_checkpoint",
    "prefetch",
    "save_checkpoint",
    "table_blocks",
]


def __getattr__(name: str) -> Any:
    if name == "affinity":
        return import_module("flexd.affinity")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flexd' has no attribute {name!r}")
