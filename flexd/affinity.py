"""For loaders that read a sample where its rows are, and ship nothing.

sampler = flexd.affinity.NodeSampler(features, collection, batch_size=256)
node = flexd.affinity.NodeMap.load("nodes.npz").node_of(user_ids)
"""

from typing import TYPE_CHECKING, Any

from flexd.core.node_map import NodeMap

if TYPE_CHECKING:
    from flexd.embedding.node_sampler import NodeSampler

__all__ = ["NodeMap", "NodeSampler"]


def __getattr__(name: str) -> Any:
    if name == "NodeSampler":  # needs torch, which a producer need not have
        from flexd.embedding.node_sampler import NodeSampler

        return NodeSampler
    raise AttributeError(f"module 'flexd.affinity' has no attribute {name!r}")
